"""What parts of transformers compute, by their structure: norms, activations, feed-forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..op.base import FusibleOperation
from ..ops.activation import GELU, QGELU, ReLU, SiLU, SReLU
from ..ops.glu import GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU
from ..views import BorrowedPackedLinear, BorrowedRMSNorm, view
from .pattern import Names, Pattern, function_of
from .rules import FuseSkip

__all__ = [
    "activation",
    "feed_forward",
    "linear",
    "norm",
    "part",
    "parts_of_sum_and_norm",
    "product_and_activation",
]

MakeOp = Callable[[], FusibleOperation]


def _find(module: nn.Module, patterns: Sequence[Pattern]) -> Names | None:
    """The names in the first pattern that is the whole `forward` of the module. None of a function
    that is wrapped: who knows in what."""
    function = type(module).forward
    if hasattr(function, "__wrapped__"):
        return None
    found = (pattern.match_all(function) for pattern in patterns)
    return next((names for names in found if names is not None), None)


def _patterns(*texts: str) -> tuple[Pattern, ...]:
    return tuple(map(Pattern, texts))


def _viewed(module: nn.Module) -> FusibleOperation:
    try:
        return view(module)
    except (TypeError, ValueError) as error:
        raise FuseSkip(str(error).removeprefix("[view] ")) from None


# ---- norms

# These round before the scale, or behind it, or both; ours rounds once, behind it.
_RMS_NORMS = _patterns(
    """
    D = X.dtype
    X = X.to(torch.float32)
    V = X.pow(2).mean(-1, keepdim=True)
    X = X * torch.rsqrt(V + self.any_eps)
    return self.weight * X.to(D)
    """,
    """
    D = X.dtype
    X = X.to(torch.float32)
    V = X.pow(2).mean(-1, keepdim=True)
    X = X * torch.rsqrt(V + self.any_eps)
    return (self.weight * X).to(D)
    """,
)
# Gemma's: the scale is 1 + weight.
_CENTERED_RMS_NORMS = _patterns(
    """
    Y = self._norm(X.float())
    Y = Y * (1.0 + self.weight.float())
    return Y.type_as(X)
    """
)
_NORM_METHODS = _patterns(
    "return X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + self.any_eps)",
)


def norm(module: nn.Module) -> FusibleOperation:
    """The op of a norm over the last dimension. FuseSkip for another module."""
    names = _find(module, _RMS_NORMS)
    if names is not None:
        return BorrowedRMSNorm(module, names["eps"])
    if _find(module, _CENTERED_RMS_NORMS) is not None:
        method = function_of(type(module)._norm)  # type: ignore[attr-defined]
        names = _NORM_METHODS[0].match_all(method)
        if names is not None:
            return BorrowedRMSNorm(module, names["eps"], zero_centered_gamma=True)
    return _viewed(module)


# ---- activations

# The forward of a class -> (the op, its gated unit).
_ACTIVATIONS: tuple[tuple[tuple[Pattern, ...], MakeOp, MakeOp], ...] = (
    (
        _patterns("return nn.functional.silu(X)", "return F.silu(X, inplace=self.inplace)"),
        SiLU,
        SwiGLU,
    ),
    (_patterns("return F.relu(X, inplace=self.inplace)"), ReLU, ReGLU),
    (_patterns("return X * torch.sigmoid(1.702 * X)"), QGELU, QGEGLU),
    (
        _patterns(
            """
            Y = nn.functional.relu(X)
            Z = torch.square(Y)
            return Z
            """
        ),
        SReLU,
        SReGLU,
    ),
    (
        _patterns(
            "return 0.5 * X * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * "
            "(X + 0.044715 * torch.pow(X, 3.0))))"
        ),
        GELU,
        GEGLU,
    ),
)
_CALLS_ACT = _patterns("return self.act(X)")


def _activation(module: nn.Module) -> tuple[MakeOp, MakeOp]:
    """The op of an activation, and its gated unit. FuseSkip for another module."""
    for patterns, alone, gated in _ACTIVATIONS:
        if _find(module, patterns) is not None:
            return alone, gated
    kind: Any = None
    if _find(module, _CALLS_ACT) is not None:
        act: Any = module.act
        if act is nn.functional.gelu:
            kind = "none"
        elif isinstance(act, functools.partial) and act.func is nn.functional.gelu:
            kind = act.keywords.get("approximate", "none") if not act.args else None
    elif type(module).forward is nn.GELU.forward:
        kind = module.approximate
    if kind is None:
        raise FuseSkip(f"there is no op for the activation {type(module).__name__}")
    return functools.partial(GELU, kind), functools.partial(GEGLU, kind)


# ---- feed-forwards

_GATED = _patterns(
    """
    Y = self.any_down(self.any_act(self.any_gate(X)) * self.any_up(X))
    return Y
    """,
    "return self.any_down(self.any_act(self.any_gate(X)) * self.any_up(X))",
)
# gate and up in one weight, gate first.
_GATED_IN_ONE = _patterns(
    """
    Y = self.any_up(X)
    Z, Y = Y.chunk(2, dim=-1)
    Y = Y * self.any_act(Z)
    return self.any_down(Y)
    """
)
_UNGATED = _patterns(
    """
    X = self.any_up(X)
    X = self.any_act(X)
    X = self.any_down(X)
    return X
    """,
    """
    X = self.any_up(X)
    X = self.any_act(X)
    X = self.any_down(X)
    X = self.any_drop(X)
    return X
    """,
    "return self.any_down(self.any_act(self.any_up(X)))",
)


def feed_forward(module: nn.Module) -> list[FusibleOperation]:
    """The ops of a feed-forward. FuseSkip for another module."""
    for patterns, make in (
        (_GATED, _gated),
        (_GATED_IN_ONE, _gated_in_one),
        (_UNGATED, _ungated),
    ):
        names = _find(module, patterns)
        if names is not None:
            return make({k: getattr(module, v) for k, v in names.items() if len(k) > 1})
    raise FuseSkip(f"the forward of {type(module).__name__} is not known")


def _gated(parts: dict[str, Any]) -> list[FusibleOperation]:
    gate, up = _linear(parts["gate"]), _linear(parts["up"])
    if len({parameter.dtype for part in (gate, up) for parameter in part.parameters()}) > 1:
        raise FuseSkip("gate and up have different dtypes")
    unit = _activation(parts["act"])[1]
    return [BorrowedPackedLinear(gate, up), unit(), _viewed(_linear(parts["down"]))]


def _gated_in_one(parts: dict[str, Any]) -> list[FusibleOperation]:
    unit = _activation(parts["act"])[1]
    return [_viewed(_linear(parts["up"])), unit(), _viewed(_linear(parts["down"]))]


def _ungated(parts: dict[str, Any]) -> list[FusibleOperation]:
    act = _activation(parts["act"])[0]
    ops = [_viewed(_linear(parts["up"])), act(), _viewed(_linear(parts["down"]))]
    return [*ops, _viewed(parts["drop"])] if "drop" in parts else ops


def _linear(module: nn.Module) -> nn.Module:
    if type(module).forward is not nn.Linear.forward:
        raise FuseSkip(f"{type(module).__name__} is not a torch.nn.Linear")
    return module


def part(module: nn.Module) -> list[FusibleOperation]:
    """The ops of a feed-forward, a norm or a dropout; none of an identity. FuseSkip for another
    module."""
    kind = type(module)
    if kind.forward is nn.Identity.forward:
        return []
    if kind.forward is nn.Dropout.forward:
        return [_viewed(module)]
    try:
        return feed_forward(module)
    except FuseSkip as skip:
        if any(isinstance(inner, nn.Linear) for inner in module.modules()):
            raise skip
    return [norm(module)]


def linear(module: nn.Module) -> FusibleOperation:
    """The op of a `torch.nn.Linear`. FuseSkip for another module."""
    return _viewed(_linear(module))


def activation(module: nn.Module) -> FusibleOperation:
    """The op of an activation. FuseSkip for another module."""
    return _activation(module)[0]()


_PRODUCT_AND_ACTIVATION = _patterns(
    """
    X = self.any_up(X)
    X = self.any_act(X)
    return X
    """
)
_PRODUCT_SUM_NORM = _patterns(
    """
    X = self.any_down(X)
    X = self.any_drop(X)
    X = self.any_norm(X + Y)
    return X
    """
)


def product_and_activation(module: nn.Module) -> list[FusibleOperation]:
    """The ops of a product with its activation. FuseSkip for another module."""
    names = _find(module, _PRODUCT_AND_ACTIVATION)
    if names is None:
        raise FuseSkip(f"the forward of {type(module).__name__} is not known")
    up, act = (getattr(module, names[name]) for name in ("up", "act"))
    return [linear(up), activation(act)]


def parts_of_sum_and_norm(module: nn.Module) -> list[nn.Module]:
    """Product, dropout and norm of a product whose sum with another tensor is normalized. FuseSkip
    for another module."""
    names = _find(module, _PRODUCT_SUM_NORM)
    if names is None:
        raise FuseSkip(f"the forward of {type(module).__name__} is not known")
    return [getattr(module, names[name]) for name in ("down", "drop", "norm")]
