"""A row for each built-in fusion; `test_fusions.py` runs every property on each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from helpers import residual
from process_groups import group_of_zeros
from torch import Tensor

import transformer_ops as tops

ACTIVATIONS: dict[str, Callable[[], tops.FusibleOperation]] = {
    **{name: getattr(tops, name) for name in ("GELU", "QGELU", "ReLU", "SReLU", "SiLU")},
    "GELU exact": lambda: tops.GELU("none"),
}


class Case(NamedTuple):
    """A fusion, ops on which it fires, and the basic ops that it covers.

    The first op takes rows of 16. The caller passes `extra_inputs` of the input's shape.
    """

    rule: str
    pass_name: str
    make: Callable[[], list[tops.FusibleOperation]]
    covers: tuple[int, ...]
    extra: str = ""
    extra_inputs: int = 0

    def __str__(self) -> str:
        return f"{self.rule}{self.extra and '-' + self.extra}"

    def inputs(self, x: Tensor) -> list[Tensor]:
        """The main input and the extra inputs."""
        generator = torch.Generator().manual_seed(7)
        shapes = [x.shape] * self.extra_inputs
        return [x, *(torch.randn(shape, generator=generator).to(x.dtype) for shape in shapes)]


def before(*made: tops.FusibleOperation) -> list[tops.FusibleOperation]:
    """Adds a norm in front, so that the input of the fused op also requires a gradient."""
    return [tops.LayerNorm(16), *made]


GLUS: dict[str, Callable[[], tops.FusibleOperation]] = {
    **{name: getattr(tops, name) for name in ("GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU")},
    "GEGLU exact": lambda: tops.GEGLU("none"),
    "SwiGLU": tops.SwiGLU,
    "SwiGLU interleaved": lambda: tops.SwiGLU(glu_interleave_size=4),
    "SiTUGLU": lambda: tops.SiTUGLU(beta1=0.5, beta2=2.0, glu_interleave_size=2),
    "ClampedSwiGLU": lambda: tops.ClampedSwiGLU(limit=0.8, alpha=1.1, glu_linear_offset=0.25),
}
NORMS: dict[str, Callable[[], tops.FusibleOperation]] = {
    "layer_norm": lambda: tops.LayerNorm(16, eps=1e-3),
    "layer_norm without bias": lambda: tops.LayerNorm(16, bias=False),
    "layer_norm not affine": lambda: tops.LayerNorm(16, elementwise_affine=False),
    "rms_norm": lambda: tops.RMSNorm(16, eps=1e-3, zero_centered_gamma=True),
    "rms_norm not affine": lambda: tops.RMSNorm(16, elementwise_affine=False),
}


SCALED: dict[str, Callable[[], tops.FusibleOperation]] = {
    "ScaledSwiGLU": tops.ScaledSwiGLU,
    "ScaledSwiGLU interleaved": lambda: tops.ScaledSwiGLU(glu_interleave_size=4),
    "ScaledSiTUGLU": lambda: tops.ScaledSiTUGLU(beta1=0.5, beta2=2.0),
    "ScaledClampedQGeGLU": lambda: tops.ScaledClampedQGeGLU(limit=0.8, alpha=1.1),
    "ScaledSReLU": tops.ScaledSReLU,
}


def with_experts(*made: tops.BasicOperation, experts: int = 3) -> list[tops.FusibleOperation]:
    """Each token goes to all experts, so that rounding does not change the choice. The extra inputs
    of the ops between Dispatch and Combine read the outputs of Dispatch."""
    router, dispatch = tops.Router(16, experts, experts), tops.Dispatch(experts)
    for op, names in (
        (router, ("expert_ids", "probs", None)),
        (dispatch, ("splits", "permuted_probs", "positions")),
    ):
        for k, name in enumerate(names):
            op.set_extra_output_channel(k, name, output_to_caller=False)
    dispatch.set_extra_input_channel(0, "expert_ids").set_extra_input_channel(1, "probs")
    for op in made:
        if op.num_extra_inputs == 0:
            continue
        name = "splits" if isinstance(op, tops.GroupedLinear) else "permuted_probs"
        op.set_extra_input_channel(0, name)
    combine = tops.Combine().set_extra_input_channel(0, "positions")
    return before(router, dispatch, *made, combine)


def residual_block() -> list[tops.FusibleOperation]:
    """x + dropout(linear(x))."""
    return residual(tops.Linear(16, 16), tops.Dropout(0.4))


def two_blocks(norm: Callable[[], tops.FusibleOperation]) -> list[tops.FusibleOperation]:
    """Two consecutive pre-norm blocks: a channel passes the new residual on."""
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "next", output_to_caller=False)
    join = tops.AddExtraInput().set_extra_input_channel(0, "next")
    return [tops.GELU(), tops.AddExtraInput(), fork, norm(), tops.Bias(16), tops.GELU(), join]


def forward_cases() -> Iterator[Case]:
    """Forward fusions with a residual or a GLU."""
    bias_dropout_add = Case("bias_dropout_add", "forward", residual_block, (2, 3, 4))
    yield bias_dropout_add
    plain = lambda p: before(tops.Bias(16), tops.Dropout(p), tops.AddExtraInput())  # noqa: E731
    for p in (0.1, 1.0):
        yield bias_dropout_add._replace(
            make=lambda p=p: plain(p), covers=(1, 2, 3), extra=f"p={p}", extra_inputs=1
        )
    bias_add = lambda: before(tops.Bias(16), tops.AddExtraInput())  # noqa: E731
    yield Case("bias_add", "forward", bias_add, (1, 2), extra_inputs=1)
    yield Case("bias_add", "forward", lambda: plain(0.0), (1, 2, 3), "dropout off", extra_inputs=1)
    for name, norm in NORMS.items():
        # Each row has parameters.
        add = lambda n=norm: [tops.GELU(), tops.AddExtraInput(), n(), tops.Bias(16)]  # noqa: E731
        rule, _, form = f"add_{name}".partition(" ")
        yield Case(rule, "forward", add, (1, 2), form, extra_inputs=1)
        hand_out = lambda n=norm: [  # noqa: E731
            tops.GELU(),
            tops.AddExtraInput(),
            tops.MakeExtraOutput(),
            n(),
            tops.Bias(16),
        ]
        residual = Case(rule, "forward", hand_out, (1, 2, 3), f"residual {form}", extra_inputs=1)
        yield residual
        yield residual._replace(make=lambda n=norm: two_blocks(n), extra=f"channel {form}")
    yield from scaled_residuals()
    yield from linear_epilogues()
    for name, glu in GLUS.items():
        block = lambda g=glu: before(tops.Linear(16, 24), g(), tops.L2Normalization())  # noqa: E731
        yield Case("linear_bias_glu", "forward", block, (1, 2, 3), name)


def scaled_residuals() -> Iterator[Case]:
    """The end of a block of a vision transformer."""
    made: dict[str, Callable[[], list[tops.FusibleOperation]]] = {
        "both": lambda: [tops.LayerScale(16, 0.5), tops.DropPath(0.4)],
        "all dropped": lambda: [tops.LayerScale(16, 0.5), tops.DropPath(1.0)],
        "scale": lambda: [tops.LayerScale(16, 0.5)],
        "no path dropped": lambda: [tops.LayerScale(16, 0.5), tops.DropPath(0.0)],
        "path": lambda: [tops.DropPath(0.4)],
    }
    for name, make in made.items():
        block = lambda m=make: before(*m(), tops.AddExtraInput())  # noqa: E731
        covers = tuple(range(1, len(make()) + 2))
        yield Case("scale_drop_add", "forward", block, covers, name, extra_inputs=1)


def scaled_block() -> list[tops.FusibleOperation]:
    """x + drop_path(layer_scale(linear(x)))."""
    return residual(tops.Linear(16, 16), tops.LayerScale(16, 0.5), tops.DropPath(0.4))


def linear_epilogues() -> Iterator[Case]:
    """A product with every choice of ops that may follow it, and with idle ops in between."""
    made: dict[str, Callable[[], tops.FusibleOperation]] = {
        "bias": lambda: tops.Bias(16),
        "scale": lambda: tops.ConstantScale(-0.7),
        "add": tops.AddExtraInput,
        "off": lambda: tops.Dropout(0.0),
        "same": tops.Identity,
        "one": lambda: tops.ConstantScale(1.0),
    }
    chosen = ["add", "scale add", "bias add", "bias scale", "bias scale add"]
    idle = ["off add", "bias off add", "one bias same add", "bias same scale off one add"]
    for names in chosen + idle:
        make = lambda n=names: before(  # noqa: E731
            tops.BasicLinear(16, 16), *(made[name]() for name in n.split())
        )
        covers = tuple(range(1, 2 + len(names.split())))
        extra_inputs = int(names.endswith("add"))
        yield Case("linear_epilogue", "forward", make, covers, names, extra_inputs)
    # Backward fuses the dropout with the bias, and the fork with the scale.
    bias = lambda: before(tops.Linear(16, 24), tops.Dropout(0.3))  # noqa: E731
    yield Case("linear_epilogue", "forward", bias, (1, 2), "bias")
    scale = lambda: before(  # noqa: E731
        tops.MakeExtraOutput(), tops.BasicLinear(16, 16), tops.ConstantScale(-0.7)
    )
    yield Case("linear_epilogue", "forward", scale, (2, 3), "scale")


def cases() -> Iterator[Case]:
    """Rows of rules without a residual or a GLU."""
    for name, activation in ACTIVATIONS.items():
        block = lambda a=activation: before(tops.Linear(16, 24), a(), tops.L2Normalization())  # noqa: E731
        yield Case("linear_bias_activation", "forward", block, (1, 2, 3), name)
        yield Case("activation_bias", "backward", block, (2, 3), name)
        alone = lambda a=activation: before(tops.Bias(16), a())  # noqa: E731
        yield Case("activation_bias", "backward", alone, (1, 2), name + " without Linear")
    for name in ("ReLU", "SReLU"):
        activation = getattr(tops, name)
        block = lambda a=activation: before(a(), tops.Linear(16, 24))  # noqa: E731
        yield Case("activation_linear", "forward_backward", block, (1, 2), name)
    options = {"bias": False, "single_grouped_weight": True}
    for name, scaled in SCALED.items():
        narrow = 16 if name == "ScaledSReLU" else 8
        block = lambda s=scaled, n=narrow: with_experts(  # noqa: E731
            tops.GroupedLinear(3, 16, 16, **options), s(), tops.GroupedLinear(3, n, 16, **options)
        )
        yield Case("moe_mlp", "forward_backward", block, (2, 3, 4, 5, 6), name)
        block = lambda s=scaled, n=narrow: with_experts(  # noqa: E731
            tops.GroupedLinear(3, 16, 16, **options),
            s(),
            tops.GroupedLinear(3, n, 16, **options),
            tops.SiLU(),
        )
        yield Case("grouped_mlp", "forward_backward", block, (3, 4, 5), name)
        block = lambda s=scaled: with_experts(tops.GroupedLinear(3, 16, 16, **options), s())  # noqa: E731
        yield Case("grouped_linear_scaled", "forward", block, (3, 4), name)
    product = lambda width: tops.GroupedLinear(3, width, 16, bias=False)  # noqa: E731
    each = "a parameter each"
    block = lambda: with_experts(product(16), tops.ScaledSwiGLU(), product(8))  # noqa: E731
    yield Case("moe_mlp", "forward_backward", block, (2, 3, 4, 5, 6), each)
    block = lambda: with_experts(product(16), tops.ScaledSwiGLU(), product(8), tops.SiLU())  # noqa: E731
    yield Case("grouped_mlp", "forward_backward", block, (3, 4, 5), each)
    block = lambda: with_experts(product(16), tops.ScaledSwiGLU())  # noqa: E731
    yield Case("grouped_linear_scaled", "forward", block, (3, 4), each)


def inner_residual(*made: tops.FusibleOperation) -> list[tops.FusibleOperation]:
    """x + f(x), with ops in front so that x requires a gradient."""
    return before(*residual(*made))


def backward_cases() -> Iterator[Case]:
    """The rows of backward fusions."""
    for norm in (tops.LayerNorm, tops.RMSNorm):
        name = "layer_norm_residual" if norm is tops.LayerNorm else "rms_norm_residual"
        hidden = lambda n=norm: inner_residual(n(16), tops.SiLU())  # noqa: E731
        yield Case(name, "backward", hidden, (1, 2), "hidden")
        visible = lambda n=norm: before(tops.MakeExtraOutput(), n(16))  # noqa: E731
        yield Case(name, "backward", visible, (1, 2), "visible")
        bare = lambda n=norm: inner_residual(n(16, elementwise_affine=False))  # noqa: E731
        yield Case(name, "backward", bare, (1, 2), "not affine")
        centered = lambda n=norm: inner_residual(n(16, zero_centered_gamma=True))  # noqa: E731
        yield Case(name, "backward", centered, (1, 2), "zero-centered")
    half = lambda: inner_residual(tops.LayerNorm(16, bias=False))  # noqa: E731
    yield Case("layer_norm_residual", "backward", half, (1, 2), "without bias")
    linear = lambda: inner_residual(tops.Linear(16, 24), tops.SiLU(), tops.Linear(24, 16))  # noqa: E731
    yield Case("linear_residual_scale", "backward", linear, (1, 2), "hidden")
    linear = lambda: before(tops.MakeExtraOutput(), tops.BasicLinear(16, 24))  # noqa: E731
    yield Case("linear_residual_scale", "backward", linear, (1, 2), "visible")
    # Forward fuses the residual with both.
    scale = lambda: before(  # noqa: E731
        tops.BasicLinear(16, 16), tops.ConstantScale(-0.7), tops.AddExtraInput()
    )
    yield Case("linear_residual_scale", "backward", scale, (1, 2), "scale", extra_inputs=1)
    both = lambda: inner_residual(tops.BasicLinear(16, 16), tops.ConstantScale(-0.7))  # noqa: E731
    yield Case("linear_residual_scale", "backward", both, (1, 2, 3), "both")
    idle = lambda: inner_residual(  # noqa: E731
        tops.Identity(), tops.BasicLinear(16, 16), tops.Dropout(0.0), tops.ConstantScale(-0.7)
    )
    yield Case("linear_residual_scale", "backward", idle, (1, 2, 3, 4, 5), "idle")
    # Forward fuses the residual with both.
    linear = lambda: before(tops.Linear(16, 16), tops.AddExtraInput())  # noqa: E731
    yield Case("bias_linear", "backward", linear, (1, 2), extra_inputs=1)
    dropout = lambda: before(tops.Linear(16, 24), tops.Dropout(0.3))  # noqa: E731
    yield Case("dropout_bias", "backward", dropout, (2, 3))
    alone = lambda: before(tops.Bias(16), tops.Dropout(1.0), tops.Bias(16))  # noqa: E731
    yield Case("dropout_bias", "backward", alone, (1, 2), "all dropped, without Linear")
    yield Case("layer_scale_drop_path", "backward", scaled_block, (3, 4))
    alone = lambda: before(tops.LayerScale(16, 0.5), tops.DropPath(1.0))  # noqa: E731
    yield Case("layer_scale_drop_path", "backward", alone, (1, 2), "all dropped")
    for name in ("GELU", "GELU exact", "QGELU", "SiLU"):
        activation = ACTIVATIONS[name]
        block = lambda a=activation: before(tops.Linear(16, 24), a(), tops.BasicLinear(24, 16))  # noqa: E731
        yield Case("linear_activation", "backward", block, (2, 3, 4), name)
        alone = lambda a=activation: before(a(), tops.BasicLinear(16, 24))  # noqa: E731
        yield Case("linear_activation", "backward", alone, (1, 2), name + " without bias")
    idle = lambda: before(  # noqa: E731
        tops.Linear(16, 24), tops.Identity(), tops.GELU(), tops.Dropout(0.0), tops.Linear(24, 16)
    )
    yield Case("linear_activation", "backward", idle, (2, 3, 4, 5, 6), "idle")
    for name, glu in GLUS.items():
        block = lambda g=glu: before(tops.BasicLinear(16, 48), g(), tops.BasicLinear(24, 16))  # noqa: E731
        yield Case("linear_glu", "backward", block, (2, 3), name)
    for name, glu in GLUS.items():
        block = lambda g=glu: before(tops.Linear(16, 48), g())  # noqa: E731
        yield Case("glu_bias", "backward", block, (2, 3), name)
    for name, scaled in SCALED.items():
        width = 16 if name == "ScaledSReLU" else 8
        block = lambda s=scaled, w=width: with_experts(  # noqa: E731
            s(), tops.GroupedLinear(3, w, 16, bias=False, single_grouped_weight=True)
        )
        yield Case("scaled_grouped_linear", "backward", block, (3, 4), name)
    block = lambda: with_experts(  # noqa: E731
        tops.ScaledSwiGLU(), tops.GroupedLinear(3, 8, 16, bias=False)
    )
    yield Case("scaled_grouped_linear", "backward", block, (3, 4), "a parameter each")
    alone = lambda: before(tops.Bias(16), tops.SwiGLU())  # noqa: E731
    yield Case("glu_bias", "backward", alone, (1, 2), "without Linear")
    for rule, sequence in (("gather_linear", True), ("reduce_gradient_linear", False)):
        split = {"tensor_parallel_mode": "column", "sequence_parallel": sequence}
        block = lambda split=split: before(  # noqa: E731
            tops.Linear(16, 24, tensor_parallel_group=group_of_zeros(), **split)
        )
        passes = "forward, backward" if sequence else "backward"
        yield Case(rule, passes, block, (1, 2, 3))
        alone = lambda split=split: before(  # noqa: E731
            tops.BasicLinear(16, 24, tensor_parallel_group=group_of_zeros(), **split)
        )
        yield Case(rule, passes, alone, (1, 2), "without bias")
    for bias in (True, False):
        row = lambda bias=bias: tops.Linear(  # noqa: E731
            32,
            24,
            bias=bias,
            tensor_parallel_mode="row",
            tensor_parallel_group=group_of_zeros(),
            sequence_parallel=True,
        )
        extra = "" if bias else "without bias"
        ops = (3, 4, 5) if bias else (3, 4)
        block = lambda row=row: before(  # noqa: E731
            tops.AllGather(group_of_zeros()), tops.GELU(), row()
        )
        yield Case("linear_scatter", "forward", block, ops, extra)
        block = lambda row=row: before(  # noqa: E731
            tops.AllGather(group_of_zeros()), tops.RMSNorm(16), row()
        )
        yield Case("linear_scatter", "forward, backward", block, ops, extra)


CASES = [*cases(), *forward_cases(), *backward_cases()]
