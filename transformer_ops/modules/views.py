"""`view`: ops on the parameters of torch's own modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, FusibleOperation
from ..op.borrowed import Borrowed, class_of, find_obstacle
from ..op.checks import check_approximate
from ..op.view import of_owner
from ..ops.activation import GELU, ReLU, SiLU
from ..ops.basic_linear import BasicLinear
from ..ops.bias import Bias
from ..ops.drop_path import DropPath
from ..ops.dropout import Dropout
from ..ops.layer_scale import LayerScale
from ..ops.lora_linear import LoRALinear
from ..ops.norm import LayerNorm, RMSNorm
from ..ops.packed_linear import PackedLinear
from ..quantization.stored import as_quantized, is_stored

__all__ = [
    "Adapted",
    "Adapter",
    "BorrowedDropPath",
    "BorrowedDropout",
    "BorrowedLayerNorm",
    "BorrowedLayerScale",
    "BorrowedLinear",
    "BorrowedLoRALinear",
    "BorrowedPackedLinear",
    "BorrowedProduct",
    "BorrowedRMSNorm",
    "check_linear",
    "is_torch",
    "register_view",
    "view",
    "weight_of",
]


class BorrowedProduct(Borrowed, BasicLinear):
    """The product of a `torch.nn.Linear`."""

    # Nobody splits the parameters of such a module, or accumulates their gradients.
    accumulate_into_main_grad = False
    _rng_state_tracker_function = None
    # These scales would have no place in a state dict.
    _takes_scales = False
    _watched: tuple[str, ...] = ("in_features", "out_features")
    _decoded: tuple[str, ...] = ("weight",)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return weight_of(self._parameter_owner)

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        owner = self._parameter_owner
        return [(self if is_stored(owner.weight) else owner, "weight")]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[0]


class BorrowedTransposedProduct(BorrowedProduct):
    """The product of a module whose weight is stored as `[in_features, out_features]`."""

    _watched = ()
    _decoded = ()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._parameter_owner.weight.t()  # type: ignore[operator]

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        # The gradient of the view goes to the parameter.
        return [(self, "weight")]


class BorrowedBias(Borrowed, Bias):
    """The bias of a `torch.nn.Linear`."""

    bias = of_owner("bias")

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.bias.shape[0]


def weight_of(module: Any) -> nn.Parameter:
    """The weight of a linear layer, with the shape and the dtype of its product."""
    found: nn.Parameter = as_quantized(module.weight, getattr(module, "compute_dtype", None))
    return found


def check_linear(weight: Any, bias: Any) -> None:
    """ValueError if parameters have shapes that a `torch.nn.Linear` does not make."""
    if weight.dim() != 2:
        raise ValueError(f"[view] weight must have 2 dimensions, got {weight.dim()}")
    if bias is not None and bias.shape != weight.shape[:1]:
        shape = list(weight.shape[:1])
        raise ValueError(f"[view] bias must have shape {shape}, got {list(bias.shape)}")


class BorrowedLinear(FusibleOperation):
    """A `torch.nn.Linear`: its product, and its bias if it has one. If `is_transposed`, it is a
    module with a weight `[in_features, out_features]`, as in GPT-2."""

    def __init__(self, owner: nn.Module, is_transposed: bool = False) -> None:
        super().__init__()
        weight: Any = owner.weight.t() if is_transposed else weight_of(owner)  # type: ignore[operator]
        check_linear(weight, owner.bias)
        product = BorrowedTransposedProduct if is_transposed else BorrowedProduct
        # This bypasses nn.Module, which would register the parts as submodules.
        self.__dict__["_parts"] = (product(owner), BorrowedBias(owner))

    @property
    def basic_ops(self) -> list[BasicOperation]:
        product, bias = self.__dict__["_parts"]
        return [product] if product._parameter_owner.bias is None else [product, bias]

    def _let_go_of(self, module: nn.Module) -> None:
        """From now on the op does not keep this owner alive."""
        for part in self.__dict__["_parts"]:
            part._let_go_of(module)

    @property
    def _has_own_forward(self) -> bool:
        return any(part._has_own_forward for part in self.basic_ops)

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Same as `FusibleOperation.forward`, but the owner itself is called if it has hooks or a
        `forward` of its own."""
        if self._has_own_forward:
            return self.__dict__["_parts"][0]._parameter_owner(input, *extra_inputs, **kwargs)
        return super().forward(input, *extra_inputs, **kwargs)


class BorrowedPackedLinear(Borrowed, PackedLinear):
    """Several `torch.nn.Linear` of one input, whose outputs are next to each other."""

    accumulate_into_main_grad = False
    _rng_state_tracker_function = None
    _watched = ("in_features", "out_features")
    _decoded = ("weight",)

    def __init__(self, *owners: nn.Module) -> None:
        super().__init__(owners[0])
        self.__dict__["_lenders"] = owners
        self.__dict__["_products"] = [BorrowedProduct(owner) for owner in owners]

    def _owners(self) -> list[nn.Module]:
        return list(self.__dict__["_lenders"])

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return ("weight", "bias")

    def _tensors_in(self, parameter: str) -> list[Tensor | None]:
        if parameter == "weight":
            return list(self._weights())
        return [getattr(owner, parameter) for owner in self._owners()]

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        weights = [place for one in self.__dict__["_products"] for place in one._tensor_places()]
        return [*weights, *((owner, "bias") for owner in self._owners())]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self._weights()[0].shape[1]

    @property
    def out_features(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(weight.shape[0] for weight in self._weights())

    def _weights(self) -> list[Tensor]:
        return [product.weight for product in self.__dict__["_products"]]

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Same as `FusibleOperation.forward`, but the owners themselves are called if one has hooks
        or a `forward` of its own."""
        if self._has_own_forward:
            return torch.cat([owner(input) for owner in self._owners()], -1)
        return FusibleOperation.forward(self, input, *extra_inputs, **kwargs)


class Adapter(NamedTuple):
    """Modules of an adapter of low rank: `scaling * b(a(dropout(x)))`. `b` may have a bias."""

    a: nn.Module
    b: nn.Module
    dropout: nn.Module
    scaling: float


class Adapted(NamedTuple):
    """A module that adds adapters to the product of its base, a `torch.nn.Linear` or, if it
    `is_transposed`, a module with a weight `[in_features, out_features]`."""

    module: nn.Module
    base: nn.Module
    adapters: tuple[Adapter, ...]
    is_transposed: bool

    @property
    def weight(self) -> Tensor:
        """`[out_features, in_features]`."""
        if self.is_transposed:
            transposed: Any = self.base.weight
            return transposed.t()
        return weight_of(self.base)

    @property
    def added_biases(self) -> list[Tensor]:
        """The scaled biases of adapters."""
        pairs: Any = ((one.b.bias, one.scaling) for one in self.adapters)
        return [bias * scaling for bias, scaling in pairs if bias is not None]

    @property
    def has_bias(self) -> bool:
        """Whether the base or an adapter has a bias."""
        return self.base.bias is not None or bool(self.added_biases)

    @property
    def bias(self) -> Tensor:
        """The sum of all biases, in the dtype of the product."""
        own: Any = [] if self.base.bias is None else [self.base.bias]
        return functools.reduce(torch.add, [*own, *self.added_biases]).to(self.weight.dtype)


class BorrowedLoRALinear(Borrowed, LoRALinear):
    """Products with adapters, of one input and side by side. Some of them may have no adapters."""

    accumulate_into_main_grad = False

    def __init__(self, *parts: Adapted) -> None:
        adapters = [(i, one) for i, part in enumerate(parts) for one in part.adapters]
        # Groups ask it whether it is training.
        super().__init__(adapters[0][1].dropout)
        own = self.__dict__
        own["_parts"] = parts
        own["_adapters"] = [one for _, one in adapters]
        own["adapted"] = tuple(i for i, _ in adapters)
        own["scaling"] = tuple(one.scaling for _, one in adapters)
        own["_forwards"] = [class_of(one).forward for one in self._owners()]

    @property
    def owner(self) -> nn.Module:
        """The layer of the first product."""
        found: nn.Module = self.__dict__["_parts"][0].module
        return found

    def _owners(self) -> list[nn.Module]:
        own = self.__dict__
        products = (module for part in own["_parts"] for module in (part.module, part.base))
        adapters = (module for one in own["_adapters"] for module in one[:3])
        return [*products, *adapters]

    def _obstacle(self) -> str | None:
        forwards = self.__dict__["_forwards"]
        pairs = zip(self._owners(), forwards, strict=True)
        places = self._decoded_places()
        found = (
            find_obstacle(
                owner,
                forward,
                owner._parameters,
                encoded=[name for one, name in places if one is owner],
            )
            for owner, forward in pairs
        )
        return next((why for why in found if why is not None), None)

    def _decoded_places(self) -> list[tuple[nn.Module, str]]:
        parts = self.__dict__["_parts"]
        return [(part.base, "weight") for part in parts if not part.is_transposed]

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        own = self.__dict__
        weights = [
            (self, f"weight{i}")
            if part.is_transposed or is_stored(part.base.weight)
            else (part.base, "weight")
            for i, part in enumerate(own["_parts"])
        ]
        # The gradient of a sum goes to each of its biases.
        biases = [
            (self, f"bias{i}") if part.added_biases else (part.base, "bias")
            for i, part in enumerate(own["_parts"])
        ]
        a = [(one.a, "weight") for one in own["_adapters"]]
        return [*weights, *biases, *a, *((one.b, "weight") for one in own["_adapters"])]

    def __getattr__(self, name: str) -> Any:
        for kind in ("weight", "bias"):
            number = name.removeprefix(kind)
            if number != name and number.isdecimal():
                return getattr(self.__dict__["_parts"][int(number)], kind)
        return super().__getattr__(name)

    @property
    def p(self) -> float:  # type: ignore[override]
        return float(getattr(self._parameter_owner, "p", 0.0))

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return int(self.__dict__["_parts"][0].weight.shape[1])

    @property
    def out_features(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(part.weight.shape[0] for part in self.__dict__["_parts"])

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Same as `FusibleOperation.forward`, but the modules themselves are called if one has
        hooks or a `forward` of its own."""
        if self._has_own_forward:
            return torch.cat([part.module(input) for part in self.__dict__["_parts"]], -1)
        return FusibleOperation.forward(self, input, *extra_inputs, **kwargs)


class BorrowedLayerNorm(Borrowed, LayerNorm):
    """A `torch.nn.LayerNorm`."""

    zero_centered_gamma = False
    _watched = ("eps", "normalized_shape")

    weight = of_owner("weight")
    bias = of_owner("bias")

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._parameter_owner.normalized_shape)  # type: ignore[arg-type]

    @property
    def eps(self) -> float:  # type: ignore[override]
        return float(self._parameter_owner.eps)  # type: ignore[arg-type]


class BorrowedRMSNorm(Borrowed, RMSNorm):
    """A `torch.nn.RMSNorm`, or another module that computes the same.

    `eps`: the owner's attribute name; `zero_centered_gamma`: whether the scale is `1 + weight`;
    `of_weight`: whether it has the shape of its weight, and no `normalized_shape`.
    """

    def __init__(
        self,
        owner: nn.Module,
        eps: str = "eps",
        zero_centered_gamma: bool = False,
        *,
        of_weight: bool = True,
    ) -> None:
        super().__init__(owner)
        own = self.__dict__
        own["_watched"], own["_gamma"] = (eps,), zero_centered_gamma
        own["_is_of_weight"] = of_weight

    weight = of_owner("weight")

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        if self.__dict__["_is_of_weight"]:
            return tuple(self.weight.shape)
        return tuple(self._parameter_owner.normalized_shape)  # type: ignore[arg-type]

    @property
    def eps(self) -> float | None:  # type: ignore[override]
        found: float | None = getattr(self._parameter_owner, self.__dict__["_watched"][0])
        return None if found is None else float(found)

    @property
    def zero_centered_gamma(self) -> bool:  # type: ignore[override]
        found: bool = self.__dict__["_gamma"]
        return found


class _BorrowedProbability(Borrowed):
    def __init__(self, owner: nn.Module, p: str = "p") -> None:
        super().__init__(owner)
        self.__dict__["_watched"] = (p, "inplace")

    @property
    def p(self) -> float:
        return float(getattr(self._parameter_owner, self._watched[0]))


class BorrowedDropout(_BorrowedProbability, Dropout):  # type: ignore[override]
    """A `torch.nn.Dropout`, or another module that drops; `p`: the attribute name of its
    probability."""


class BorrowedDropPath(_BorrowedProbability, DropPath):  # type: ignore[override]
    """A module that drops whole samples; `p`: the attribute name of its probability."""


class BorrowedLayerScale(Borrowed, LayerScale):
    """A module that scales each channel; `gamma`: the attribute name of its factors."""

    _watched = ("inplace",)

    def __init__(self, owner: nn.Module, gamma: str = "gamma") -> None:
        super().__init__(owner)
        self.__dict__["_gamma_name"] = gamma

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return (self.__dict__["_gamma_name"],)

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [(self._parameter_owner, self.__dict__["_gamma_name"])]

    @property
    def gamma(self) -> nn.Parameter:  # type: ignore[override]
        found: nn.Parameter = getattr(self._parameter_owner, self.__dict__["_gamma_name"])
        return found

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.gamma.shape[0]


class _BorrowedActivation(Borrowed):
    cache_quantized_input = False


class BorrowedGELU(_BorrowedActivation, GELU):
    """A `torch.nn.GELU`."""

    _watched = ("approximate",)

    @property
    def approximate(self) -> str:  # type: ignore[override]
        return check_approximate("GELU", "approximate", self._parameter_owner.approximate)


class BorrowedSiLU(_BorrowedActivation, SiLU):
    """A `torch.nn.SiLU`."""

    _watched = ("inplace",)


class BorrowedReLU(_BorrowedActivation, ReLU):
    """A `torch.nn.ReLU`."""

    _watched = ("inplace",)


def _not_in_place(make: Callable[[Any], FusibleOperation]) -> Callable[[Any], FusibleOperation]:
    def made(module: Any) -> FusibleOperation:
        if module.inplace:
            name = type(module).__name__
            raise ValueError(f"[view] {name} must not work in place, got inplace=True")
        return make(module)

    return made


_MAKERS: dict[type[nn.Module], Callable[[Any], FusibleOperation]] = {
    nn.Linear: BorrowedLinear,
    nn.LayerNorm: BorrowedLayerNorm,
    nn.RMSNorm: functools.partial(BorrowedRMSNorm, of_weight=False),
    nn.Dropout: _not_in_place(BorrowedDropout),
    nn.GELU: BorrowedGELU,
    nn.SiLU: _not_in_place(BorrowedSiLU),
    nn.ReLU: _not_in_place(BorrowedReLU),
}


# These return no op for modules that they do not know.
_OTHER_MAKERS: list[Callable[[Any], FusibleOperation | None]] = []


def register_view(make: Callable[[Any], FusibleOperation | None]) -> None:
    """Has `view` ask this function about modules of other libraries."""
    _OTHER_MAKERS.append(make)


# These are the functions at import time, because somebody may replace those of torch's classes.
_KNOWN: tuple[Any, ...] = (*_MAKERS, nn.Identity, nn.Sequential)
_FORWARDS = {kind: kind.forward for kind in _KNOWN}


def is_torch(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module's class has the same `forward` as this torch class."""
    forward = class_of(module).forward
    return forward is _FORWARDS[kind] and forward is kind.forward


def view(module: nn.Module) -> FusibleOperation:
    """Returns an op that computes what a torch module does, with the parameters of that module.
    They stay in its state dict and its optimizer, and may be tied or frozen.

    The op reads parameters, attributes (`eps`, `p`) and the `training` flag from the module at each
    call. If the module cannot be bypassed, it is itself called within the `Sequential`. This is so
    if it has hooks, a `forward` of its own, another class than before, or a parameter of a special
    class, as adapters, quantizers and DTensor have.

    The parameters belong to the module: a `Sequential` of views has no parameters, and `train()`
    and `to()` on it do not change the module.

    Args:
        module: a `torch.nn` Linear, LayerNorm, RMSNorm, Dropout, GELU, SiLU or ReLU, or of a
            subclass with the same `forward`; or a LoRA layer of PEFT. Its op has the adapters that
            are active now. In a rule of `register_fuse_rule`, it is made anew if they change.

    Raises:
        TypeError: the module is another one, or has its own `forward`.
        ValueError: the module has an option that no op has.
        FuseSkip: it has adapters that no op computes.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"[view] module must be an nn.Module, got {type(module).__name__}")
    for known, make in _MAKERS.items():
        if isinstance(module, known) and is_torch(module, known):
            return make(module)
    for make_other in _OTHER_MAKERS:
        op = make_other(module)
        if op is not None:
            return op
    names = ", ".join(known.__name__ for known in _MAKERS)
    has_own = isinstance(module, tuple(_MAKERS))
    raise TypeError(
        f"[view] module must be one of torch.nn's {names}, got {class_of(module).__name__}"
        f"{' with a forward of its own' if has_own else ''}"
    )
