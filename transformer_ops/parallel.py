"""Tensor and sequence parallelism of whole models: styles for torch's `parallelize_module`.

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = Shard(0)  # between the products each rank has its share of the rows
    parallelize_module(mlp, mesh, {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    })

The styles turn parameters into DTensors and set how the op is split. There are no hooks, so the ops
stay in their groups. Activations are plain local tensors, and a layout describes their contents:
`Replicate()` means all, `Shard(0)` this rank's rows, `Shard(-1)` its columns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from .op.tensor_parallel import SplitProductMixin
from .ops.basic_linear import BasicLinear
from .ops.dispatch import Dispatch
from .ops.grouped_linear import GroupedLinear
from .ops.linear import Linear
from .ops.packed_linear import PackedLinear
from .quantization.scales import drop_scales, has_scales, is_new

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "deinterleave_glu",
    "interleave_glu",
    "local",
]

ROWS, COLUMNS = Shard(0), Shard(-1)


class _SplitProduct(ParallelStyle):
    """A product whose weights are split."""

    mode: str
    dim: int  # of the weight
    products: tuple[type[nn.Module], ...]

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        if not isinstance(module, self.products):
            *others, last = [product.__name__ for product in self.products]
            raise TypeError(
                f"[{style}] module must be a {', '.join(others)} or {last} of transformer_ops, "
                f"got {type(module).__name__}"
            )
        assert isinstance(module, SplitProductMixin)
        if module.tensor_parallel_mode is not None:
            raise ValueError(
                f"[{style}] module must not be split yet, got {module.tensor_parallel_mode!r}"
            )
        module._check_split(self.mode, device_mesh.size())
        names = [name for name, parameter in module.named_parameters(recurse=False)]
        of_bias = self._place_bias()
        placements = {n: of_bias if n.startswith("bias") else Shard(self.dim) for n in names}
        _distribute(module, device_mesh, placements, self.src_data_rank)
        module._split_parameters(self.mode, device_mesh, self.sequence_parallel)
        return module

    def _place_bias(self) -> Placement:
        return ROWS if self.mode == "column" else Replicate()


class ColwiseParallel(_SplitProduct):
    """Splits the output features: the weight and the bias by rows, `Shard(0)`; each weight and bias
    of a `PackedLinear` separately.

    Args:
        input_layouts: `Replicate()` (None), or `Shard(0)`: each rank has its share of the rows,
            which are gathered.
        output_layouts: `Shard(-1)` (None).

    Before a gated linear unit, each rank needs matching parts of both halves of the output. A
    `PackedLinear` gives them. Behind a `Linear`, the unit needs a `glu_interleave_size`, and the
    weight rows in that order (`interleave_glu`); otherwise the first call raises ValueError.

    Raises:
        ValueError: the layout is another one; the module is already split; the ranks do not divide
            the features.
        TypeError: the module is no product.
    """

    mode, dim = "column", 0
    products = (Linear, BasicLinear, PackedLinear)

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        rows = _one_of(self, "input_layouts", input_layouts, Replicate(), ROWS)
        _one_of(self, "output_layouts", output_layouts, COLUMNS)
        super().__init__(rows == ROWS)


class RowwiseParallel(_SplitProduct):
    """Splits the input features: the weight by columns, `Shard(1)`. All ranks have the same bias.

    Args:
        input_layouts: `Shard(-1)` (None).
        output_layouts: `Replicate()` (None), or `Shard(0)`: each rank gets its share of the rows.

    Raises the same errors as `ColwiseParallel`.
    """

    mode, dim = "row", 1
    products = (Linear, BasicLinear)

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        _one_of(self, "input_layouts", input_layouts, COLUMNS)
        rows = _one_of(self, "output_layouts", output_layouts, Replicate(), ROWS)
        super().__init__(rows == ROWS)


class ExpertParallel(ParallelStyle):
    """Splits experts among the ranks, an equal consecutive part for each.

    It applies to `Dispatch`, which then drops the copies for other ranks, and to `GroupedLinear`,
    whose parameters are split by experts, `Shard(0)`. Place an `AllGather` before them, because
    each rank has to see all tokens, and a `ReduceScatter` after `Combine`. A `Router` between these
    has the style `SequenceParallel`.

    Raises:
        ValueError: the ranks do not divide the experts; the experts are already split; a
            GroupedLinear lacks `single_grouped_weight` (or `single_grouped_bias`).
        TypeError: the module is another one.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (Dispatch, GroupedLinear)):
            raise TypeError(
                "[ExpertParallel] module must be a Dispatch or GroupedLinear, "
                f"got {type(module).__name__}"
            )
        ranks, op = device_mesh.size(), type(module).__name__
        experts = module.num_experts if isinstance(module, Dispatch) else module.num_groups
        if experts % ranks:
            raise ValueError(
                f"[{op}] the number of experts must be divisible by the {ranks} ranks, "
                f"got {experts}"
            )
        if isinstance(module, Dispatch):
            if module.local_experts != experts:
                raise ValueError(
                    f"[{op}] local_experts must be all {experts}, got {module.local_experts}"
                )
            module.local_experts = experts // ranks
            module.first_expert = device_mesh.get_local_rank() * module.local_experts
            return module
        names = {name for name, parameter in module.named_parameters(recurse=False)}
        if module._are_experts_shared or not names <= {"weight", "bias"}:
            raise ValueError(
                f"[{op}] parameters must be one weight and at most one bias, not shared yet "
                f"(single_grouped_weight=True, single_grouped_bias=True), got {sorted(names)}"
            )
        if has_scales(module) and is_new(module):
            drop_scales(module)
        if has_scales(module):
            raise ValueError(
                f"[{op}] scales of delayed scaling must not be there, which ranks that share "
                "experts do not keep; tops.quantization.reset_scales(model) drops them"
            )
        _distribute(module, device_mesh, dict.fromkeys(names, ROWS), self.src_data_rank)
        module.num_groups = experts // ranks
        module._are_experts_shared = True
        return module


class ReplicateParallel(ParallelStyle):
    """Parameters that are whole on every rank, and whose gradient is the same on every rank.

    This is for any module: ops of transformer_ops, and others that read the parameters with
    `local`.
    """

    _is_partial = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, parameter in module.named_parameters(recurse=False)]
        _distribute(module, device_mesh, dict.fromkeys(names, Replicate()), self.src_data_rank)
        module._has_partial_gradients = self._is_partial  # type: ignore[assignment]
        return module


class SequenceParallel(ReplicateParallel):
    """Parameters that are whole on every rank, for ops that see only this rank's rows or heads,
    such as a QKNorm behind a split product. Their gradients are summed over the ranks."""

    _is_partial = True


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """The tensor of this rank, for code that is not an op of transformer_ops.

    `partial`: the gradient on each rank is a part of the sum over all ranks. A plain tensor is
    returned unchanged.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not partial:
        return parameter.to_local()
    # This sums the parts in backward; to_local() alone would give the parameter a partial gradient.
    whole = parameter.redistribute(placements=parameter.placements)
    return whole.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def interleave_glu(tensor: Tensor, size: int) -> Tensor:
    """Reorders the rows `[a | b]` of a weight or bias before a gated linear unit for
    `glu_interleave_size=size`: `size` rows of a, `size` rows of b, and so on.

    Raises ValueError unless `2 * size` divides the number of rows.
    """
    blocks = _blocks(tensor, size)
    return tensor.unflatten(0, (2, blocks, size)).transpose(0, 1).flatten(0, 2)


def deinterleave_glu(tensor: Tensor, size: int) -> Tensor:
    """The inverse of `interleave_glu`."""
    blocks = _blocks(tensor, size)
    return tensor.unflatten(0, (blocks, 2, size)).transpose(0, 1).flatten(0, 2)


def _blocks(tensor: Tensor, size: int) -> int:
    rows = tensor.shape[0] if tensor.dim() else 0
    if size < 1 or rows % (2 * size):
        raise ValueError(
            f"[interleave_glu] tensor must have rows divisible by {2 * size}, "
            f"got shape {tuple(tensor.shape)}"
        )
    return rows // (2 * size)


def _one_of(style: Any, name: str, given: Placement | None, *known: Placement) -> Placement:
    if given is None:
        return known[0]
    if given not in known:
        rule = " or ".join(map(str, known))
        raise ValueError(f"[{type(style).__name__}] {name} must be {rule}, got {given}")
    return given


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: int | None
) -> None:
    """Turns all parameters into DTensors, or none."""
    if mesh.ndim != 1:
        raise ValueError(f"[parallel] mesh must have 1 dimension, got {mesh.ndim}")
    made = {}
    for name, parameter in module.named_parameters(recurse=False):
        tensor = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=source)
        made[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, parameter in made.items():
        module.register_parameter(name, parameter)
