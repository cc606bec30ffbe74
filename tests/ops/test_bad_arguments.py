"""Values that a constructor of an op refuses: one row a value. The generator of torch does not
change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from process_groups import group_of_zeros

from transformer_ops import ops

NAN, INF = math.nan, math.inf
WANTS_A_GRADIENT = torch.tensor(2.0, requires_grad=True)
Row = tuple[Any, tuple[Any, ...], dict[str, Any], str]


def row(message: str, op: Any, *args: Any, **kwargs: Any) -> Row:
    return op, args, kwargs, message


COLUMN = {"tensor_parallel_mode": "column"}
SPLIT_BY_ROW = {"tensor_parallel_mode": "row"}
ROWS = [
    row(r"shape must have at most one -1, got \(-1, -1\)", ops.Reshape, (-1, -1)),
    row("each size of shape must be an int >= -1, got -2", ops.Reshape, (2, -2)),
    row("each size of shape must be an int", ops.Reshape, (2.0,)),
    row("each size of shape must be an int", ops.Reshape, (True,)),
    row("shape must be a sequence of ints, got 4", ops.Reshape, 4),
    row("shape must be a sequence of ints, got '12'", ops.Reshape, "12"),
    row("shape must not have a -1 beside a 0", ops.Reshape, (0, -1)),
    *[
        row("scale must be a finite number", ops.ConstantScale, value)
        for value in (
            *(NAN, INF, "2", None, True),
            *(torch.ones(1), torch.tensor(True), WANTS_A_GRADIENT),
        )
    ],
    *[
        row("size must be an int >= 1, got ", ops.Bias, value)
        for value in (0, -1, 2.0, True, None, "3", torch.tensor(3))
    ],
    row("dtype must be one of float32, float16", ops.Bias, 3, dtype=torch.int64),
    row("dtype must be one of .* got torch.complex64", ops.Bias, 3, dtype=torch.complex64),
    *[
        row(f"{name} must be ", op, **{"in_features": 3, "out_features": 5, name: value})
        for op in (ops.BasicLinear, ops.Linear)
        for name, value in (
            *[(size, value) for size in ("in_features", "out_features") for value in (0, -1)],
            ("in_features", 1.5),
            ("out_features", False),
            ("accumulate_into_main_grad", 1),
            ("rng_state_tracker_function", 1),
            ("dtype", torch.int32),
        )
    ],
    *[
        row(message, op, 3, 5, **kwargs)
        for op in (ops.BasicLinear, ops.Linear)
        for message, kwargs in (
            ('tensor_parallel_mode must be "column", "row" or', {"tensor_parallel_mode": "rows"}),
            ("tensor_parallel_group must exist in this process", SPLIT_BY_ROW),
            (
                "sequence_parallel must come with a tensor_parallel_mode",
                {"sequence_parallel": True},
            ),
            ("sequence_parallel must be a bool, got 1", {"sequence_parallel": 1}),
            ("tensor_parallel_group must come with a", {"tensor_parallel_group": 1}),
            (
                "tensor_parallel_group must be a ProcessGroup .*, got 'world'",
                {**SPLIT_BY_ROW, "tensor_parallel_group": "world"},
            ),
            (
                "in_features must be divisible by the 2 ranks of tensor_parallel_group, got 3",
                {**SPLIT_BY_ROW, "tensor_parallel_group": group_of_zeros},
            ),
            (
                "out_features must be divisible by the 2 ranks of tensor_parallel_group, got 5",
                {**COLUMN, "tensor_parallel_group": group_of_zeros},
            ),
        )
    ],
    row(
        "size must be divisible by the 2 ranks of tensor_parallel_group, got 3",
        ops.Bias, 3, tensor_parallel=True, tensor_parallel_group=group_of_zeros,
    ),
    row("tensor_parallel must be a bool, got 1", ops.Bias, 3, tensor_parallel=1),
    row(
        "tensor_parallel_group must come with tensor_parallel=True",
        ops.Bias, 3, tensor_parallel_group=group_of_zeros,
    ),
    row("bias must be a bool, got None", ops.Linear, 3, 5, bias=None),
    *[
        row(message, op, *args, **kwargs)
        for op in (ops.LayerNorm, ops.RMSNorm)
        for message, args, kwargs in (
            ("normalized_shape must be an int >= 1, got 0", (0,), {}),
            ("each size of normalized_shape must be an int >= 1, got 0", ((2, 0),), {}),
            (r"normalized_shape must have at least one size, got \(\)", ((),), {}),
            ("normalized_shape must be an int >= 1, got True", (True,), {}),
            ("normalized_shape must be an int >= 1, got '4'", ("4",), {}),
            *[
                (f"eps must be a finite number >= 0.*, got {eps!r}", (4,), {"eps": eps})
                for eps in (-1e-5, NAN, INF, "1")
            ],
            ("elementwise_affine must be a bool, got 1", (4, 1e-5, 1), {}),
            (
                "zero_centered_gamma must be False where there is no weight, got True",
                (4,),
                {"elementwise_affine": False, "zero_centered_gamma": True},
            ),
            ("zero_centered_gamma must be a bool, got 1", (4,), {"zero_centered_gamma": 1}),
        )
    ],
    row("eps must be a finite number >= 0, got None", ops.LayerNorm, 8, eps=None),
    row("size must be an int >= 1, got 0", ops.LayerScale, 0),
    row("init_values must be a finite number, got nan", ops.LayerScale, 4, NAN),
    row("p must", ops.DropPath, 1.5),
    row("approximate must be 'none' or 'tanh', got 'erf'", ops.GELU, "erf"),
    row("approximate must be 'none' or 'tanh', got None", ops.GEGLU, None),
    row("eps must be a finite number >= 0, got -1", ops.L2Normalization, eps=-1),
    row("eps must be a finite number >= 0, got nan", ops.L2Normalization, eps=NAN),
    *[
        row(
            f"glu_interleave_size must be an int >= 1, got {value}", op, glu_interleave_size=value
        )
        for op in (ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU)
        for value in (0, -1, True, 2.0)
    ],
    *[
        row(f"{name} must be a finite number > 0, got {value}", ops.SiTUGLU, **{name: value})
        for name in ("beta1", "beta2")
        for value in (0, -1.0, NAN, INF, True)
    ],
    *[
        row("limit must be a finite number > 0", ops.ClampedSwiGLU, limit=value)
        for value in (0, -7.0, NAN, INF)
    ],
    row("alpha must be a finite number", ops.ClampedSwiGLU, alpha=NAN),
    row("glu_linear_offset must be a finite", ops.ClampedSwiGLU, glu_linear_offset=INF),
    *[
        row(rf"p must be a number in \[0, 1\], got {value!r}", ops.Dropout, value)
        for value in (-0.1, 1.5, NAN, INF, True, "0.5", None, 10**400)
    ],
    row("in_place must be a bool, got 1", ops.AddExtraInput, in_place=1),
    row("in_place must be a bool", ops.MakeExtraOutput, in_place=None),
    row("top_k must be at most num_experts, 3, got 4", ops.Router, 8, 3, 4),
    row("num_experts must be an int >= 1, got 0", ops.Router, 8, 0, 1),
    row("score must be one of softmax, sigmoid, got 'tanh'", ops.Router, 8, 3, 2, score="tanh"),
    row("balanced must be a bool, got 1", ops.Router, 8, 3, 2, balanced=1),
    row("out_features must have at least one size", ops.PackedLinear, 4, ()),
    row("each size of out_features must be an int >= 1, got 0", ops.PackedLinear, 4, (3, 0)),
    row("in_features must be an int >= 1, got 0", ops.PackedLinear, 0, (4, 4)),
    *[
        row(message, ops.PackedLinear, 4, (4, 4), **kwargs)
        for message, kwargs in (
            ("bias must be a bool, got 1", {"bias": 1}),
            (
                "rng_state_tracker_function must be callable or None",
                {"rng_state_tracker_function": 3},
            ),
            ("accumulate_into_main_grad must be a bool", {"accumulate_into_main_grad": None}),
        )
    ],
    *[
        row(message, ops.LoRALinear, 48, (40, 24, 8), **kwargs)
        for message, kwargs in (
            ("each size of rank must be an int >= 1, got 0", {"rank": 0}),
            ("rank must have one entry for each of 3 adapters, got", {"rank": (4, 4)}),
            (
                "scaling must have one entry for each of 3 adapters",
                {"rank": 4, "scaling": (1.0,)},
            ),
            ("scaling must be a finite number, got nan", {"rank": 4, "scaling": NAN}),
            (
                "rank must have one entry for each of 0 adapters, got 4",
                {"rank": 4, "adapted": ()},
            ),
            (r"adapted must be in \[0, 3\), got 3", {"rank": 4, "adapted": (0, 3)}),
            (r"p must be a number in \[0, 1\], got 1.5", {"rank": 4, "dropout": 1.5}),
        )
    ],
    *[
        row(message, ops.LinearCrossEntropy, 8, 13, **kwargs)
        for message, kwargs in (
            ("reduction must be one of mean, sum, none, got 'max'", {"reduction": "max"}),
            ("gradients_in must be one of forward, backward, got 'both'", {"gradients_in": "both"}),
            (
                "gradients_in must be 'backward' where reduction is 'none', got 'forward'",
                {"reduction": "none", "gradients_in": "forward"},
            ),
            (r"label_smoothing must be a number in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
            ("softcap must be a finite number > 0, got 0", {"softcap": 0}),
            ("z_loss must be a finite number >= 0, got -1.0", {"z_loss": -1.0}),
            ("chunk must be an int >= 1, got 0", {"chunk": 0}),
            ("ignore_index must be an int", {"ignore_index": 1.5}),
            ("bias must be a bool, got 1", {"bias": 1}),
            ("log_probs must be a bool, got None", {"log_probs": None}),
        )
    ],
    *[
        row("activation_recompute_in_mlp must be a bool", op, activation_recompute_in_mlp=1)
        for op in (ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU)
    ],
    row("num_groups must be an int >= 1, got 0", ops.GroupedLinear, 0, 4, 4),
    *[
        row(message, ops.GroupedLinear, 2, 4, 4, **kwargs)
        for message, kwargs in (
            ("bias must be a bool, got 1", {"bias": 1}),
            ("single_grouped_weight must be a bool, got 1", {"single_grouped_weight": 1}),
            ("scale_bias must come with bias=True", {"bias": False, "scale_bias": True}),
            ("delay_wgrad_compute must be a bool, got 1", {"delay_wgrad_compute": 1}),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "message"),
    ROWS,
    ids=[f"{op.__name__}: {text}" for op, *_, text in ROWS],
)
def test_a_bad_argument(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    # A test before this one may have destroyed all groups.
    kwargs = {k: group_of_zeros() if v is group_of_zeros else v for k, v in kwargs.items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^\[{op.__name__}\] {message}"):
        op(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
