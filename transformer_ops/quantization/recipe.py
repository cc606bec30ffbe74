"""Recipes: the formats in which products take their operands, as frozen values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from ..base.constructors import names_its_arguments
from ..base.handles import handles
from .number_format import format_with

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizerRole",
    "Recipe",
]


class FormatRange(NamedTuple):
    """The largest numbers of a format's codes in forward and in backward."""

    max_fwd: float
    max_bwd: float


_E4M3, _E5M2 = format_with("e4m3", "float32"), format_with("e5m2", "float32")
_NVFP4 = format_with("e2m1", "e4m3", (1, 16))


class Format(enum.Enum):
    """The type of codes. E4M3 and E5M2 have 4 and 5 bits of exponent (Micikevicius et al. 2022,
    "FP8 formats for deep learning"); E2M1 is the 4-bit format of NVFP4. HYBRID is E4M3 in forward
    and E5M2 for gradients."""

    E2M1 = FormatRange(_NVFP4.largest, _NVFP4.largest)
    E4M3 = FormatRange(_E4M3.largest, _E4M3.largest)
    E5M2 = FormatRange(_E5M2.largest, _E5M2.largest)
    HYBRID = FormatRange(_E4M3.largest, _E5M2.largest)


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Recipe:
    """The formats of operands. Recipes with equal fields are equal and share their plans."""

    # The values of `fp8_format` that this kind of scaling supports.
    _formats: ClassVar[tuple[Format, ...]] = ()

    def __post_init__(self) -> None:
        found = getattr(self, "fp8_format", None)
        if self._formats and found not in self._formats:
            names = ", ".join(f"Format.{format.name}" for format in self._formats)
            raise ValueError(
                f"[{type(self).__name__}] fp8_format must be one of {names}, got {found!r}"
            )
        # The key is computed here, because each region reads it, and computing it takes as long as
        # a few calls of ops.
        object.__setattr__(self, "_key", self._make_key())

    @property
    def operands(self) -> tuple[str, str, str]:
        """The formats of a product's input, weight and output gradient: names of formats of
        `torch.ops.transformer_ops.quantize`, or "exact"."""
        raise NotImplementedError

    def operands_of(self, op: Any) -> tuple[str, ...]:
        """The same for one op, on which those of a `CustomRecipe` depend."""
        return self.operands

    @property
    def key(self) -> str:
        """What plans depend on, as one text: the formats, and how they are used."""
        return self._key  # type: ignore[attr-defined]

    def _make_key(self) -> str:
        return ", ".join(self.operands)

    def _elements(self) -> tuple[str, str]:
        """The elements of codes in forward, and for gradients."""
        format = getattr(self, "fp8_format", Format.E4M3)
        forward = "e5m2" if format is Format.E5M2 else "e4m3"
        return forward, "e4m3" if format is Format.E4M3 else "e5m2"


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for each 32 adjacent numbers (OCP Microscaling formats 1.0). The
    exponent is rounded up, so no number is clipped."""

    fp8_format: Format = Format.E4M3
    _formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.E5M2, Format.HYBRID)

    @property
    def operands(self) -> tuple[str, str, str]:
        forward, backward = (format_with(e, "e8m0", (1, 32)).name for e in self._elements())
        return forward, forward, backward


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale for a tensor, from its largest magnitude at each use."""

    fp8_format: Format = Format.HYBRID
    _formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.E5M2, Format.HYBRID)

    @property
    def operands(self) -> tuple[str, str, str]:
        forward, backward = (format_with(e, "float32").name for e in self._elements())
        return forward, forward, backward


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale for a tensor, from the largest magnitudes of earlier tensors at the same position
    (Micikevicius et al. 2022). A tensor does not have to be read before it can be rounded.

    Each product has scales for input, weight and output gradient, computed as

        scale = largest number of the format / amax / 2^margin

    where amax is the largest of the last `amax_history_len` magnitudes ("max"), or the last one
    ("most_recent"). A magnitude that is zero or not finite does not change the scale; the first
    scale is 1. Scales change only when an outermost `autocast` is entered with gradient mode on.
    With an `amax_reduction_group` and `reduce_amax` all ranks have the same scales.

    Raises ValueError for other values of the fields.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    _formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.E5M2, Format.HYBRID)

    def __post_init__(self) -> None:
        super().__post_init__()
        length, algorithm = self.amax_history_len, self.amax_compute_algo
        rules = {
            "margin": (_is_int(self.margin) and abs(self.margin) < 64, "an integer below 64"),
            "amax_history_len": (_is_int(length) and length > 0, "a positive integer"),
            "amax_compute_algo": (algorithm in ("max", "most_recent"), "'max' or 'most_recent'"),
            "reduce_amax": (isinstance(self.reduce_amax, bool), "a bool"),
        }
        for name, (is_right, rule) in rules.items():
            if not is_right:
                got = getattr(self, name)
                raise ValueError(f"[DelayedScaling] {name} must be {rule}, got {got!r}")

    @property
    def operands(self) -> tuple[str, str, str]:
        forward, backward = (format_with(e, "float32").name for e in self._elements())
        return forward, forward, backward

    def _make_key(self) -> str:
        """Neither the scales nor the way they are computed is part of the key."""
        return ", ".join([*self.operands, f"delayed {self.amax_history_len}"])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A power-of-two scale for each 128 adjacent numbers of inputs and gradients, and for each 128
    x 128 numbers of weights (DeepSeek-V3, arXiv 2412.19437)."""

    fp8_format: Format = Format.E4M3
    _formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.HYBRID)

    @property
    def operands(self) -> tuple[str, str, str]:
        forward, backward = self._elements()
        operands = ((forward, (1, 128)), (forward, (128, 128)), (backward, (1, 128)))
        input, weight, grad_output = (format_with(e, "power of two", b).name for e, b in operands)
        return input, weight, grad_output


_SCOPES = ("none", "weights", "activations", "all")
_NVFP4_CHOICES = {
    "nvfp4_4over6": _SCOPES,
    "nvfp4_4over6_e4m3_use_256": _SCOPES,
    "nvfp4_4over6_err_mode": ("MAE", "MSE"),
}


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """4-bit codes with an E4M3 scale for each 16 adjacent numbers, and one scale for the tensor.
    Weights have a scale for each 16 x 16 numbers unless `disable_2d_quantization` (NVIDIA 2025,
    "Pretraining large language models with NVFP4", arXiv 2509.25149).

    For the gradient of the weight, each 16 rows of the input and of the output gradient are first
    transformed by a Hadamard transform with fixed signs, which spreads outliers (unless
    `disable_rht`). Rows after the last full 16 are not transformed. Gradients are rounded up or
    down at random with torch's generator, so that their mean is right (unless
    `disable_stochastic_rounding`).

    `nvfp4_4over6` chooses the scale of each block (Cook et al. 2025, "Four Over Six", arXiv
    2512.02010): its largest number becomes 6 or 4, whichever has the smaller sum of rounding
    errors. It applies to "weights", "activations" (the inputs) or "all"; gradients are rounded as
    usual. `nvfp4_4over6_err_mode` sums absolute ("MAE") or squared ("MSE") errors. Block scales go
    up to 256 instead of 448 for the tensors that `nvfp4_4over6_e4m3_use_256` names. Names, order of
    operations and results are those of TransformerEngine
    (`transformer_engine/common/recipe/__init__.py`). It does not allow the transform for tensors
    whose scales are chosen; here the transformed numbers have chosen scales, too.

    Raises ValueError for other values of the fields.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            found, allowed = getattr(self, field.name), _NVFP4_CHOICES.get(field.name)
            rule = "a bool" if allowed is None else f"one of {', '.join(map(repr, allowed))}"
            if not (isinstance(found, bool) if allowed is None else found in allowed):
                raise ValueError(f"[NVFP4BlockScaling] {field.name} must be {rule}, got {found!r}")
        super().__post_init__()

    @property
    def operands(self) -> tuple[str, str, str]:
        block = (1, 16) if self.disable_2d_quantization else (16, 16)
        return self._format("activations"), self._format("weights", block), _NVFP4.name

    def _format(self, tensors: str, block: tuple[int, int] = (1, 16)) -> str:
        if self.nvfp4_4over6 not in (tensors, "all"):
            return format_with("e2m1", "e4m3", block).name
        uses_256 = self.nvfp4_4over6_e4m3_use_256 in (tensors, "all")
        return format_with(
            "e2m1",
            "e4m3",
            block,
            four_over_six=self.nvfp4_4over6_err_mode,
            largest_scale=256.0 if uses_256 else 448.0,
        ).name

    def _make_key(self) -> str:
        words = [] if self.disable_rht else ["hadamard"]
        words += [] if self.disable_stochastic_rounding else ["stochastic"]
        return ", ".join([*self.operands, *words])


class QuantizerRole(NamedTuple):
    """A tensor that a recipe may quantize: `tensor_type` is "input", "weight" or "grad_output" of
    an op whose `module_type` is "linear" or "quantize". `op` is that op, and `module` is the module
    that owns its parameters: the `Linear` around a `BasicLinear`."""

    module_type: str
    tensor_type: str
    op: Any
    module: Any


@names_its_arguments
@dataclasses.dataclass(frozen=True, eq=False)
class CustomRecipe(Recipe):
    """Formats from a function for each op and role: `qfactory(role)` returns the name of a format
    of `torch.ops.transformer_ops.quantize`, or None for a tensor that is not quantized.

    It is called when a plan is made, so it must return the same for the same op and role. Two such
    recipes are equal only if they are the same object.
    """

    qfactory: Callable[[QuantizerRole], str | None]

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise TypeError(
                f"[CustomRecipe] qfactory must be a function of a role, got {self.qfactory!r}"
            )
        # The number with which a planning call finds the recipe.
        object.__setattr__(self, "_key", f"custom {handles.add(self)}")

    def operands_of(self, op: Any) -> tuple[str, ...]:
        """The formats of one op. Raises RuntimeError if `qfactory` returns something else."""
        module_type = "quantize" if op._kind == "Quantize" else "linear"
        found = []
        for tensor_type in ("input", "weight", "grad_output"):
            role = QuantizerRole(module_type, tensor_type, op, op._parameter_owner)
            format = self.qfactory(role)
            if format is not None and not isinstance(format, str):
                raise RuntimeError(
                    "[CustomRecipe] qfactory must return the name of a format or None, "
                    f"got {format!r}"
                )
            found.append("exact" if format is None else format)
        return tuple(found)
