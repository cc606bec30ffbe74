"""Parameters that are split over the ranks of a process group."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _C
from .checks import check_bool
from .process_group import find_group, group_name


def shard_size(op: str, name: str, size: int, ranks: int) -> int:
    """The part of `size` on each rank. Raises ValueError if the ranks do not divide it."""
    if size % ranks:
        raise ValueError(
            f"[{op}] {name} must be divisible by the {ranks} ranks of tensor_parallel_group, "
            f"got {size}"
        )
    return size // ranks


class TensorParallelMixin:
    """A module whose parameters may be split. In a group of one rank nothing is split."""

    tensor_parallel_size: int = 1
    _group_name: str | None = None

    def _take_group(self, group: Any) -> None:
        op = type(self).__name__
        name = group_name(op, "tensor_parallel_group", group)
        try:
            size = int(find_group(op, "tensor_parallel_group", name).size())
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        self._group_name, self.tensor_parallel_size = name, size

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group. None: all ranks, or nothing is split."""
        if self._group_name is None:
            return None
        return find_group(type(self).__name__, "tensor_parallel_group", self._group_name)


class SplitProductMixin(TensorParallelMixin):
    """A product that is split: "column" splits its output features, "row" its input features."""

    _modes: ClassVar[tuple[str, ...]] = ("column", "row")
    _mode_rule: ClassVar[str] = '"column", "row" or None'

    in_features: int
    out_features: Any  # an int, or one for each of several products
    tensor_parallel_mode: str | None = None
    sequence_parallel: bool = False
    _are_parts_of_whole: bool = False

    def _split(self, mode: str | None, group: Any, sequence_parallel: bool) -> None:
        op = type(self).__name__
        check_bool(op, "sequence_parallel", sequence_parallel)
        if mode is None:
            given = {"tensor_parallel_group": group, "sequence_parallel": sequence_parallel or None}
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"[{op}] {name} must come with a tensor_parallel_mode, got {value!r} alone"
                    )
            return
        if mode not in self._modes:
            raise ValueError(f"[{op}] tensor_parallel_mode must be {self._mode_rule}, got {mode!r}")
        self._take_group(group)
        if self.tensor_parallel_size > 1:
            self.tensor_parallel_mode = mode
            self.sequence_parallel = sequence_parallel
        self._check_split(mode, self.tensor_parallel_size)

    def _check_split(self, mode: str, ranks: int) -> None:
        name = "out_features" if mode == "column" else "in_features"
        shard_size(type(self).__name__, name, getattr(self, name), ranks)

    def _split_parameters(self, mode: str, group: Any, sequence_parallel: bool) -> None:
        """Turns the parameters into DTensors; each is a whole of which this rank has a part."""
        self._take_group(group)
        self._are_parts_of_whole = True
        if self.tensor_parallel_size > 1:
            self.sequence_parallel = sequence_parallel
            self.tensor_parallel_mode = mode

    @property
    def local_in_features(self) -> int:
        """The number of columns of the weight on this rank."""
        return self._local("in_features", "row")

    @property
    def local_out_features(self) -> int:
        """The number of rows of the weight on this rank."""
        return self._local("out_features", "column")

    def _local(self, name: str, mode: str) -> int:
        size: int = getattr(self, name)
        if self.tensor_parallel_mode != mode:
            return size
        return shard_size(type(self).__name__, name, size, self.tensor_parallel_size)

    def _tensor_parallel_repr(self) -> str:
        if self.tensor_parallel_mode is None:
            return ""
        text = f", tensor_parallel_mode={self.tensor_parallel_mode!r}"
        text += f", tensor_parallel_size={self.tensor_parallel_size}"
        return text + ", sequence_parallel=True" * self.sequence_parallel


# ---- parameters that are DTensors


def is_dtensor(value: object) -> bool:
    """Checks for a DTensor without importing a module that may not be needed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class _Share(torch.autograd.Function):
    """One of `ranks` equal parts of a sum over all ranks; each has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        return whole / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _make_placements() -> dict[str | None, tuple[Any, ...]]:
    """The placements of a parameter, by how its module is split. They are imported once there is a
    DTensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {
        "whole": (Replicate(),),
        "column": (Shard(0),),
        "row": (Shard(1),),
        "experts": (Shard(0),),
        "sums": (Partial(),),
    }


def local_parameter(owner: Any, name: str, parameter: Any) -> Tensor:
    """The tensor that the owner computes with on this rank, for a DTensor on a mesh of one
    dimension.

    Raises RuntimeError if the placement of the parameter does not match the owner's.
    """
    local: Tensor
    if is_compiling():
        _check_placements(owner, name, parameter)
    else:
        # In most calls it is the same tuple that was checked before.
        checked = owner.__dict__.setdefault("_placements_checked", {})
        if checked.get(name) is not parameter.placements:
            _check_placements(owner, name, parameter)
            checked[name] = parameter.placements
        if not torch.is_grad_enabled():
            # to_local() would make another Parameter of it.
            local = parameter._local_tensor
            return local / parameter.device_mesh.size() if _is_shared(owner, name) else local
    if owner._has_partial_gradients:
        placements = _make_placements()
        # The backward of the first conversion is the sum over the ranks.
        whole = parameter.redistribute(placements=placements["whole"])
        part: Tensor = whole.to_local(grad_placements=placements["sums"])
        return part
    local = parameter.to_local()
    return _Share.apply(local, parameter.device_mesh.size()) if _is_shared(owner, name) else local


def _is_shared(owner: Any, name: str) -> bool:
    """Does each rank add its part of one bias?"""
    return name == "bias" and getattr(owner, "tensor_parallel_mode", None) == "row"


def _check_placements(owner: Any, name: str, parameter: Any) -> None:
    mesh = parameter.device_mesh
    mode = getattr(owner, "tensor_parallel_mode", None)
    kind = "whole" if mode is None or (mode == "row" and name == "bias") else mode
    if owner._are_experts_shared:
        kind = "experts"
    wanted = _make_placements()[kind]
    if mesh.ndim != 1 or (parameter.placements != wanted and mesh.size() > 1):
        raise RuntimeError(
            f"[{type(owner).__name__}] {name} must be placed as {wanted} for "
            f"tensor_parallel_mode={mode!r} (transformer_ops.parallel), "
            f"got {parameter.placements}"
        )


_C.set_take_local(local_parameter)


def local_parameters(op: Any, tensors: list[Any]) -> list[Any]:
    """The parameters of a basic op; DTensors are replaced by the tensors that it computes with."""
    if op.is_python:
        return tensors  # whose methods use the parameters themselves
    return [
        local_parameter(owner, name, tensor) if is_dtensor(tensor) else tensor
        for (owner, name), tensor in zip(op._tensor_places(), tensors, strict=True)
    ]


def local_sizes(op: Any, tensors: list[Any]) -> list[Any]:
    """The same without memory or values, also if FSDP2 has sharded split parameters."""
    return [
        _local_size(owner, name, tensor) if is_dtensor(tensor) else tensor
        for (owner, name), tensor in zip(op._tensor_places(), tensors, strict=True)
    ]


def _local_size(owner: Any, name: str, parameter: Any) -> Tensor:
    mode, sizes = getattr(owner, "tensor_parallel_mode", None), list(parameter.shape)
    if mode == "column" or (mode == "row" and name == "weight"):
        sizes[0 if mode == "column" else 1] //= owner.tensor_parallel_size
    if owner._are_experts_shared:
        sizes[0] = owner.num_groups
    return torch.empty(sizes, dtype=parameter.dtype, device="meta")


def check_columns(ops: list[Any]) -> None:
    """Raises ValueError if a gated linear unit or a norm over all heads would need columns that are
    on other ranks."""
    product: Any = None
    is_split = False
    for op in ops:
        if op._kind in ("BasicLinear", "PackedLinear"):
            is_split = getattr(op._parameter_owner, "tensor_parallel_mode", None) == "column"
        if is_split and op._kind == "QKNorm" and not op.per_head:
            raise ValueError(
                "[QKNorm] per_head must be True behind a product that is split by columns, "
                "got False: a norm over all heads needs those of other ranks"
            )
        size: Any = getattr(op, "glu_interleave_size", None)
        if op._is_gated and product is not None and not size:
            raise ValueError(
                f"[{op._kind}] glu_interleave_size must be set behind a product that is split by "
                "columns, got None: the first ranks would have all gates and no values "
                "(transformer_ops.parallel.interleave_glu)"
            )
        if op._is_gated and product is not None and product.local_out_features % (2 * size):
            raise ValueError(
                f"[{op._kind}] glu_interleave_size must be such that 2 * size divides the "
                f"{product.local_out_features} columns of each rank, got {size}"
            )
        owner = op._parameter_owner
        if op._kind == "BasicLinear":
            # A module whose parameters are borrowed does not know about ranks.
            mode = getattr(owner, "tensor_parallel_mode", None)
            is_column = mode == "column" and owner._are_parts_of_whole
            product = owner if is_column else None
        elif op._is_gated or op._kind in ("PackedLinear", "Reshape"):
            product = None
