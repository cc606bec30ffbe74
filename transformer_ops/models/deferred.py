"""Logits that are computed when they are read, so that a loss needs no logits of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..views import BorrowedLinearCrossEntropy

__all__ = ["DeferredHead", "DeferredLogits"]


class Step(NamedTuple):
    """What is computed of the product: "to" (a dtype), "view" (a shape), "div", "mul" (a number) or
    "tanh"."""

    name: str
    value: Any = None

    def run(self, z: Tensor) -> Tensor:
        """The next tensor."""
        if self.name == "to":
            return z.to(self.value)
        if self.name == "view":
            return z.view(self.value)
        if self.name == "tanh":
            return torch.tanh(z)
        return z / self.value if self.name == "div" else z * self.value


class Recipe(NamedTuple):
    """How logits are computed from their input and the weight of the head."""

    head: DeferredHead
    autocast: torch.dtype | None  # where autocast was on
    steps: tuple[Step, ...] = ()

    def run(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits of all rows."""
        with self.mode(hidden):
            z = F.linear(hidden, weight, bias)
            for step in self.steps:
                z = step.run(z)
        return z

    def mode(self, hidden: Tensor) -> torch.autocast:
        """Autocast as it was when the logits were deferred."""
        device = hidden.device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    @property
    def softcap(self) -> float | None:
        """The number c of `c * tanh(z / c)`, 0 for z itself, and None for other steps."""
        steps = [step for step in self.steps if step.name not in ("to", "view")]
        if not steps:
            return 0.0
        if [step.name for step in steps] != ["div", "tanh", "mul"]:
            return None
        return float(steps[0].value) if steps[0].value == steps[2].value > 0 else None


class _Defer(torch.autograd.Function):
    """Makes deferred logits a result of their input and the weight, also for what sees them without
    `__torch_function__`: other autograd functions, and wrappers in C++."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.recipe = recipe
        made = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype, device=hidden.device
        )
        assert isinstance(made, Tensor)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given: list[Any] = [t if t is None else t.detach() for t in ctx.saved_tensors]
        pairs = zip(given, ctx.needs_input_grad, strict=False)
        wanted = [tensor.requires_grad_() for tensor, is_needed in pairs if is_needed]
        with torch.enable_grad():
            z = ctx.recipe.run(*given)
        found = iter(torch.autograd.grad(z, wanted, grads[0].to(z.dtype)))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


class DeferredLogits(torch.Tensor):
    """The logits of a head, as a tensor that is computed when anything reads its numbers.

    `F.cross_entropy` of it computes the loss by chunks of rows, and never all logits. Before that
    the logits may be cast, viewed as rows, and soft-capped. Everything else computes the logits
    first, once, and goes on with them, with the gradients that they would have had.
    """

    _hidden: Tensor
    _recipe: Recipe
    _versions: tuple[int, ...]
    _dense: Tensor | None
    _losses: list[bool]  # shared with what was deferred from the same product

    @classmethod
    def of(
        cls, hidden: Tensor, recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DeferredLogits:
        """Deferred logits of this shape and dtype."""
        owner = recipe.head.owner
        found = _Defer.apply(hidden, owner.weight, owner.bias, recipe, shape, dtype)
        assert isinstance(found, cls)
        own = vars(found)
        own.update(_hidden=hidden, _recipe=recipe, _dense=None, _losses=[])
        own["_versions"] = found._read_versions()
        return found

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        own = vars(self)
        owner = own["_recipe"].head.owner
        return own["_hidden"], owner.weight, owner.bias

    def _read_versions(self) -> tuple[int, ...]:
        return tuple(-1 if t is None else t._version for t in DeferredLogits._tensors(self))

    def _check_versions(self) -> None:
        if DeferredLogits._read_versions(self) != vars(self)["_versions"]:
            raise RuntimeError(
                "[fuse] logits must be read before the weight of the head or its input changes in "
                "place, got a change: read them before optimizer.step()"
            )

    def _next(self, step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> DeferredLogits:
        own = vars(self)
        recipe: Recipe = own["_recipe"]
        recipe = recipe._replace(steps=(*recipe.steps, step))
        found = DeferredLogits.of(own["_hidden"], recipe, shape, dtype)
        vars(found)["_losses"] = own["_losses"]
        return found

    def _computed(self) -> Tensor:
        """The logits themselves, with their gradients."""
        own = vars(self)
        if own["_dense"] is not None:
            dense: Tensor = own["_dense"]
            return dense
        DeferredLogits._check_versions(self)
        with torch.enable_grad():
            dense = own["_recipe"].run(*DeferredLogits._tensors(self))
        if not dense.is_inference():
            own["_dense"] = dense
        return dense

    def _loss(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        own = vars(self)
        DeferredLogits._check_versions(self)
        hidden, recipe = own["_hidden"], own["_recipe"]
        own["_losses"].append(True)
        rows = hidden.reshape(-1, hidden.shape[-1])
        with recipe.mode(hidden):
            loss = recipe.head.loss(recipe.softcap, options)(rows, target)
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        assert isinstance(loss, Tensor)
        return loss.to(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        deferred = _DEFERRED.get(func)
        first = args[0] if args else kwargs.get("input")
        if deferred is not None and isinstance(first, cls) and vars(first)["_dense"] is None:
            with torch._C.DisableTorchFunctionSubclass():
                found = deferred(*args, **kwargs)
            if found is not None:
                return found
        if func in _OF_GRADIENTS and vars(first)["_losses"]:
            raise RuntimeError(
                f"[fuse] {func.__name__} must be called on logits before their loss is computed, "
                "got logits whose loss did not need them: unfuse the model, or read the logits "
                "first"
            )
        return func(*_all_computed(args), **_all_computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = lambda logits: logits._computed().detach()  # noqa: E731
        args, kwargs = tree_map_only(cls, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _all_computed(values: Any) -> Any:
    return tree_map_only(DeferredLogits, lambda logits: DeferredLogits._computed(logits), values)


# ---- what needs no numbers

_OF_METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize"),
    )
} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
# The loss by chunks gives them no gradient.
_OF_GRADIENTS = {Tensor.register_hook, Tensor.retain_grad}


# ---- what is deferred too: None where it cannot be


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    dtype = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype")
    if isinstance(dtype, torch.device) and len(args) == 1 and not kwargs:
        return logits if dtype == logits.device else None
    is_alone = len(args) + len(kwargs) == 1
    if not is_alone or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if dtype == logits.dtype:
        return logits
    return logits._next(Step("to", dtype), tuple(logits.shape), dtype)


def _float(logits: DeferredLogits) -> DeferredLogits | None:
    return _to(logits, torch.float32)


def _contiguous(logits: DeferredLogits) -> DeferredLogits:
    return logits


def _view(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    """The same rows in other leading dimensions."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    if kwargs or not sizes or not all(type(size) is int for size in sizes):
        return None
    classes, count = logits.shape[-1], logits.numel()
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or (-1 in sizes and (known == 0 or count % known)):
        return None
    shape = tuple(count // known if size == -1 else size for size in sizes)
    if shape[-1] != classes or math.prod(shape) != count:
        return None
    return logits._next(Step("view", shape), shape, logits.dtype)


def _scaled(name: str) -> Callable[..., DeferredLogits | None]:
    def scaled(logits: Any, number: Any = None, **kwargs: Any) -> DeferredLogits | None:
        if kwargs or type(number) not in (int, float) or number == 0:
            return None
        return _if_cap(logits, Step(name, number))

    return scaled


def _tanh(logits: DeferredLogits) -> DeferredLogits | None:
    return _if_cap(logits, Step("tanh"))


def _if_cap(logits: DeferredLogits, step: Step) -> DeferredLogits | None:
    """Only a soft cap may become part of the loss."""
    own: Recipe = vars(logits)["_recipe"]
    names = [s.name for s in (*own.steps, step) if s.name not in ("to", "view")]
    if names != ["div", "tanh", "mul"][: len(names)]:
        return None
    return logits._next(step, tuple(logits.shape), logits.dtype)


def _cross_entropy(
    logits: Any,
    target: Any = None,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    given = (weight, size_average, reduce)
    is_plain = isinstance(target, Tensor) and type(target) in (Tensor, nn.Parameter)
    if not is_plain or target.dtype != torch.int64 or any(one is not None for one in given):
        return None
    # cross_entropy expects the classes in dimension 1, which must be the last one.
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.device != logits.device:
        return None
    if vars(logits)["_recipe"].softcap is None or reduction not in ("mean", "sum", "none"):
        return None
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    return DeferredLogits._loss(logits, target, options)


_DEFERRED: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.float: _float,
    Tensor.contiguous: _contiguous,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.div: _scaled("div"),
    Tensor.__truediv__: _scaled("div"),
    Tensor.mul: _scaled("mul"),
    Tensor.__mul__: _scaled("mul"),
    Tensor.__rmul__: _scaled("mul"),
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
}


# ---- the module that stands for the head


class DeferredHead(nn.Module):
    """Defers the product of a head. Its losses are ops on the parameters of the head."""

    # More than a training has.
    _MOST_LOSSES = 8

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        # This bypasses nn.Module, which would register the owner as a submodule.
        self.__dict__["_owner"] = owner
        self.__dict__["_losses"] = {}

    @property
    def owner(self) -> Any:
        """The head, a `torch.nn.Linear`."""
        return self.__dict__["_owner"]

    def loss(self, softcap: float | None, options: dict[str, Any]) -> BorrowedLinearCrossEntropy:
        """The op with these options."""
        losses = self.__dict__["_losses"]
        key = (softcap, *options.items())
        if key not in losses:
            if len(losses) >= self._MOST_LOSSES:
                losses.clear()
            losses[key] = BorrowedLinearCrossEntropy(self.owner, softcap=softcap or None, **options)
        found: BorrowedLinearCrossEntropy = losses[key]
        return found

    def forward(self, hidden: Tensor) -> DeferredLogits:
        """`hidden[..., in_features]` to deferred logits `[..., out_features]`."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        shape = (*hidden.shape[:-1], self.owner.out_features)
        is_double = self.owner.weight.dtype == torch.float64
        of_logits = self.owner.weight.dtype if dtype is None or is_double else dtype
        return DeferredLogits.of(hidden, Recipe(self, dtype), shape, of_logits)
