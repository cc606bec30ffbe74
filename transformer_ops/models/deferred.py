"""Logits that are computed when they are read, so that a loss needs no logits of all rows."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import enable_reentrant_dispatch, handle_torch_function
from torch.utils._pytree import tree_map_only

from .head_product import HeadProduct, frames
from .promise import Promise, Step, promise_of
from .reads import is_of_torch

__all__ = ["DeferredHead", "DeferredLogits"]


# ---- how gradients pass


def _pulled(step: Step, grad: Tensor, logits: DeferredLogits) -> Tensor:
    """The gradient of the logits that a step was computed of."""
    if step.name == "tanh":
        return grad * (1 - _fresh(logits).tanh().square())
    if step.name in ("div", "mul"):
        return step.run(grad)
    if step.name == "add":
        return grad
    promise = promise_of(logits)
    return grad.reshape(promise.shape).to(promise.dtype)


class _Defer(torch.autograd.Function):
    """Makes deferred logits a result of (hidden, weight, bias), or of other deferred logits.

    All gradients of what is computed from the logits pass here: those of the numbers, and those
    that a loss has made.
    """

    @staticmethod
    def forward(ctx: Any, promise: Promise, *sources: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        # No promise: its `dense` refers to this node.
        ctx.product, ctx.parent, ctx.step = promise.product, promise.parent, promise.step
        if promise.parent is None:
            ctx.save_for_backward(*sources)
        return _wrapper(DeferredLogits, promise)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, parent = grads[0], ctx.parent
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        made = grad.parts if isinstance(grad, DeferredGradient) else None
        if parent is None:
            if made and not torch.is_grad_enabled():
                found = list(made)
                made.clear()
            else:
                grad = _all_computed(grad)
                found = ctx.product.gradients(grad, *ctx.saved_tensors)
            pairs = zip(found, ctx.needs_input_grad[1:], strict=True)
            return None, *(one if needed else None for one, needed in pairs)
        if made and not torch.is_grad_enabled():
            pull = lambda: _pulled(ctx.step, _all_computed(grad), parent)  # noqa: E731
            return None, DeferredGradient.of(promise_of(parent), pull, made)
        return None, _pulled(ctx.step, _all_computed(grad), parent)


class _Read(torch.autograd.Function):
    """The numbers of deferred logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, numbers: Callable[[], Tensor]) -> Tensor:
        return numbers()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Loss(torch.autograd.Function):
    """The loss of deferred logits, by chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: DeferredLogits, target: Tensor, options: dict[str, Any], form: Any
    ) -> Tensor:
        promise = promise_of(logits)
        ctx.logits, ctx.options, ctx.form = logits, options, form
        ctx.set_materialize_grads(False)
        wanted = promise.product.needs if ctx.needs_input_grad[0] else (False,) * 3
        ctx.policy = promise.product.policy(target, options)
        loss, *made = promise.product.loss(form, target, options, ctx.policy, wanted)
        ctx.save_for_backward(target, *made)
        return loss.to(promise.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), logits, options = grads, ctx.logits, ctx.options
        target, *made = ctx.saved_tensors
        if grad is None:
            return None, None, None, None

        def dense() -> Tensor:
            is_double = torch.is_grad_enabled()
            z = _fresh(logits)
            with torch.enable_grad():
                loss = F.cross_entropy(z, target, **options)
            return torch.autograd.grad(loss, z, grad, create_graph=is_double)[0]

        if torch.is_grad_enabled() or _is_batched(grad):
            return dense(), None, None, None
        promise = promise_of(logits)
        parts = promise.product.loss_gradients(ctx.form, target, options, ctx.policy, grad, made)
        return DeferredGradient.of(promise, dense, parts), None, None, None


def _is_batched(grad: Tensor) -> bool:
    """Whether it is of `is_grads_batched`, or of a transform."""
    is_of_grads = torch._C._functorch.is_legacy_batchedtensor(grad)
    return is_of_grads or torch._C._are_functorch_transforms_active()


def _wrapper(kind: Any, promise: Promise) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        kind, promise.shape, dtype=promise.dtype, device=promise.product.device
    )


@contextmanager
def _as_outside() -> Iterator[None]:
    """Gradients are on, and no transform or mode of the reader changes what is computed."""
    with (
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        yield


def _fresh(logits: DeferredLogits) -> Tensor:
    """The logits as they were in forward, with their gradients."""
    with _as_outside():
        found: Tensor = _Read.apply(logits, promise_of(logits).pure)
    return found


def _computed(logits: Tensor) -> Tensor:
    """The logits themselves, which may have been written to."""
    promise = promise_of(logits)
    if promise.dense is None:
        parent = None if promise.parent is None else _computed(promise.parent)
        with _as_outside():
            if promise.is_view and parent is not None:
                promise.dense = parent.view(promise.shape)
            else:
                promise.dense = _Read.apply(logits, promise.take)
                promise.node = promise.dense.grad_fn
                promise.fix(promise.dense.detach())
    return promise.dense


def _all_computed(values: Any) -> Any:
    values = tree_map_only(DeferredLogits, _computed, values)
    return tree_map_only(DeferredGradient, lambda grad: grad.computed(), values)


def _called(func: Any) -> Any:
    """The function that was called with deferred logits. Torch names what its module has now, where
    somebody may have put a function that calls the one of torch."""
    if not isinstance(func, types.FunctionType) or is_of_torch(func.__globals__["__name__"]):
        return func
    code = handle_torch_function.__code__
    caller = next((frame.f_back for frame in frames() if frame.f_code is code), None)
    if caller is None or caller.f_code is func.__code__:
        return func
    return types.FunctionType(caller.f_code, caller.f_globals)


# ---- the tensors


class _Deferred(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _called(func)(*_all_computed(args), **_all_computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = lambda tensor: _all_computed(tensor).detach()  # noqa: E731
        with enable_reentrant_dispatch():  # what is computed has gradients
            args, kwargs = tree_map_only(_Deferred, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class DeferredGradient(_Deferred):
    """The gradient of deferred logits, of which a loss knows what it gives for the head's input and
    parameters (`parts`)."""

    parts: list[Tensor | None]

    @classmethod
    def of(
        cls, promise: Promise, compute: Callable[[], Tensor], parts: list[Tensor | None]
    ) -> DeferredGradient:
        """The gradient of these logits, which `compute` gives too."""
        found: DeferredGradient = _wrapper(cls, promise)
        vars(found).update(parts=parts, _compute=compute, _dense=None)
        return found

    def computed(self) -> Tensor:
        """The gradient itself."""
        own = vars(self)
        if own["_dense"] is None:
            own["_dense"] = own.pop("_compute")().detach()
            own["parts"] = []  # somebody may write to it
        found: Tensor = own["_dense"]
        return found


class DeferredLogits(_Deferred):
    """The logits of a head, as a tensor that is computed when anything reads its numbers.

    `F.cross_entropy` of it computes the loss by chunks of rows, and never all logits. Before that
    the logits may be cast, scaled, viewed as rows, soft-capped, and added to a row. Everything else
    computes them first, once, and goes on with them, with the gradients that they would have had.
    """

    @classmethod
    def of(cls, promise: Promise, *sources: Tensor | None) -> DeferredLogits:
        """Deferred logits that are a result of these tensors."""
        found = _Defer.apply(promise, *sources)
        assert isinstance(found, cls)
        vars(found)["_promise"] = promise
        return found

    def _next(self, step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> DeferredLogits:
        own = promise_of(self)
        promise = Promise(own.product, shape, dtype, self, step)
        own.children.add(promise)
        return DeferredLogits.of(promise, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func in _OF_AUTOGRAD:
            args, kwargs = tree_map_only(cls, _with_history(func), (args, kwargs))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not isinstance(first, cls):
            return super().__torch_function__(func, types, args, kwargs)
        promise = promise_of(first)
        if promise.is_open:
            if func in _OF_METADATA:
                return super().__torch_function__(func, types, args, kwargs)
            deferred = _DEFERRED.get(func)
            if deferred is not None and not torch._C._are_functorch_transforms_active():
                with torch._C.DisableTorchFunctionSubclass():
                    found = deferred(*args, **kwargs)
                if found is not None:
                    return found
        found = _called(func)(*_all_computed(args), **_all_computed(kwargs))
        return first if found is promise.dense else found


def _with_history(func: Any) -> Callable[[DeferredLogits], Tensor]:
    """Gives the tensor that has the gradients of logits: themselves, or after a write that autograd
    has recorded, what they are now."""

    def found(logits: DeferredLogits) -> Tensor:
        promise = promise_of(logits)
        if promise.is_view and not promise.has_loss and func in _HOOKS:
            return _computed(logits)
        dense = promise.dense
        if dense is None:
            return logits
        with torch._C.DisableTorchFunctionSubclass():
            is_same = logits.requires_grad and dense.grad_fn is promise.node
        return logits if is_same and not promise.is_view else dense

    return found


# ---- what needs no numbers

_OF_METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta"),
        *("is_sparse", "is_quantized", "is_nested", "itemsize", "requires_grad", "is_leaf"),
        "grad_fn",
    )
} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_HOOKS = {Tensor.register_hook, Tensor.retain_grad}
_OF_AUTOGRAD = {
    getattr(Tensor, name).__get__
    for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad")
} | {
    *(Tensor.__hash__, torch.autograd.grad, *_HOOKS),
}


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


def _alone(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """For calls with the logits alone: others compute them."""
    return lambda *args, **kwargs: None if kwargs or len(args) > 1 else make(*args)


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
        if kwargs or type(number) not in (int, float) or number == 0 or not math.isfinite(number):
            return None
        return logits._next(Step(name, number), tuple(logits.shape), logits.dtype)

    return scaled


def _add(logits: DeferredLogits, other: Any = None, **kwargs: Any) -> DeferredLogits | None:
    """Only what has a number for each class, and no gradient."""
    if kwargs or type(other) is not Tensor or other.requires_grad:
        return None
    classes, places = logits.shape[-1], (logits.dtype, logits.device)
    is_row = other.shape[-1:] == (classes,) and other.numel() == classes
    if not is_row or other.dim() > logits.dim() or (other.dtype, other.device) != places:
        return None
    # Somebody may write to it.
    row = other.reshape(classes).clone()
    return logits._next(Step("add", row), tuple(logits.shape), logits.dtype)


def _tanh(logits: DeferredLogits) -> DeferredLogits:
    return logits._next(Step("tanh"), tuple(logits.shape), logits.dtype)


def _clone(logits: DeferredLogits) -> DeferredLogits | None:
    """Only that of DistributedDataParallel: others want the numbers as they are now."""
    sink = getattr(sys.modules.get("torch.nn.parallel.distributed"), "_DDPSink", None)
    if sink is None or not any(f.f_code is sink.forward.__code__ for f in frames()):
        return None
    return logits._next(Step("clone"), tuple(logits.shape), logits.dtype)


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
    promise = promise_of(logits)
    form = promise.form
    if form is None or reduction not in ("mean", "sum", "none"):
        return None
    promise.product.check(is_loss=True)
    promise.has_loss = True
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    found: Tensor = _Loss.apply(logits, target, options, form)
    return found


_DEFERRED: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.float: _alone(lambda logits: _to(logits, torch.float32)),
    Tensor.contiguous: _alone(lambda logits: logits),
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.div: _scaled("div"),
    Tensor.__truediv__: _scaled("div"),
    Tensor.mul: _scaled("mul"),
    Tensor.__mul__: _scaled("mul"),
    Tensor.__rmul__: _scaled("mul"),
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    Tensor.tanh: _alone(_tanh),
    torch.tanh: _alone(_tanh),
    Tensor.clone: _alone(_clone),
    F.cross_entropy: _cross_entropy,
}


# ---- the module that stands for the head


class DeferredHead(nn.Module):
    """Defers the product of a head, and what is computed `after` it."""

    def __init__(self, owner: nn.Module, after: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        # This bypasses nn.Module, which would register the owner as a submodule.
        self.__dict__.update(_owner=owner, _after=after)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden[..., in_features]` to deferred logits `[..., num_classes]`. Tensors that do not
        fit each other raise what they raise in `F.linear`."""
        after, logits = self.__dict__["_after"], self._product(hidden)
        return logits if after is None else after(logits)

    def _product(self, hidden: Tensor) -> Tensor:
        owner = self.__dict__["_owner"]
        # FSDP frees the weight behind forward.
        is_freed = getattr(owner, "_is_fsdp_managed_module", False)
        product = None if is_freed else HeadProduct.of(hidden, owner.weight, owner.bias)
        if product is None:
            return F.linear(hidden, owner.weight, owner.bias)
        shape = (*hidden.shape[:-1], owner.weight.shape[0])
        promise = Promise(product, shape, product.dtype)
        return DeferredLogits.of(promise, hidden, owner.weight, owner.bias)
