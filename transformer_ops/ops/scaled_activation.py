"""Activations whose rows are scaled, such as the outputs of experts by their probabilities.

`x[..., n]` and the extra input `scales[...]`, a number for each row, → `scales * act(x)` in the
dtype of `x`, computed in float32 (float64 for float64) and rounded once. The scales keep their own
dtype and get a gradient.

With `activation_recompute_in_mlp` backward recomputes the output for the product that follows,
instead of saving it, also under `Sequential(..., recompute="none")`; under the default, "cheap", it
does so anyway. `cache_quantized_input` is as in `GELU`. Raises ValueError unless both are bools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool
from .activation import _Activation
from .glu import _ClampedGLU, _InterleavedGLU, _SiTUGLU

__all__ = ["ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU"]


class _Scaled(BasicOperation):
    """An activation whose output backward may recompute for the next product."""

    _checks: ClassVar[Mapping[str, Check]] = {"activation_recompute_in_mlp": check_bool}

    activation_recompute_in_mlp: bool


class ScaledSwiGLU(_InterleavedGLU, _Scaled, kind="ScaledSwiGLU"):
    """`SwiGLU` (Shazeer 2020) times `scales`, an extra input with a number for each row.

    `x[..., 2h]`, `scales[...]` → `[..., h]` in the dtype of `x`; both get a gradient.

    The argument and its error are those of `SwiGLU`. With `activation_recompute_in_mlp`, backward
    recomputes the output for the next product, whatever the policy of the Sequential. Raises
    ValueError unless that is a bool.
    """

    def __init__(
        self,
        *,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledSiTUGLU(_SiTUGLU, _Scaled, kind="ScaledSiTUGLU"):
    """`SiTUGLU` times `scales`, an extra input with a number for each row.

    `x[..., 2h]`, `scales[...]` → `[..., h]` in the dtype of `x`; both get a gradient.

    Arguments and errors are those of `SiTUGLU`. With `activation_recompute_in_mlp`, backward
    recomputes the output for the next product, whatever the policy of the Sequential. Raises
    ValueError unless that is a bool.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(
            beta1=beta1,
            beta2=beta2,
            glu_interleave_size=glu_interleave_size,
            cache_quantized_input=cache_quantized_input,
        )
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledClampedQGeGLU(_ClampedGLU, _Scaled, kind="ScaledClampedQGeGLU"):
    """`ClampedSwiGLU` (OpenAI 2025) times `scales`, an extra input with a number for each row.

    `x[..., 2h]`, `scales[...]` → `[..., h]` in the dtype of `x`; both get a gradient.

    Arguments and errors are those of `ClampedSwiGLU`. With `activation_recompute_in_mlp`, backward
    recomputes the output for the next product, whatever the policy of the Sequential. Raises
    ValueError unless that is a bool.
    """

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
            cache_quantized_input=cache_quantized_input,
        )
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledSReLU(_Activation, _Scaled, kind="ScaledSReLU"):
    """`max(x, 0)^2` (So et al. 2021) times `scales`, an extra input with a number for each row.

    `x[..., n]`, `scales[...]` → `[..., n]` in the dtype of `x`; both get a gradient.

    With `activation_recompute_in_mlp`, backward recomputes the output for the next product,
    whatever the policy of the Sequential. Raises ValueError unless that is a bool.
    """

    def __init__(
        self, *, activation_recompute_in_mlp: bool = False, cache_quantized_input: bool = False
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
