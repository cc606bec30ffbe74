"""Arguments for the typed ops: valid ones by the names of their schema, and wrong ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from process_groups import group_of_zeros
from torch import Tensor

from transformer_ops import _C

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = tuple(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "bits" not in str(dtype) and "q" not in str(dtype)
)
ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
GLUS = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu", "clamped_swiglu")
PAIRS = dict(_C.typed_op_pairs())


# tests/ops/test_grouped.py and test_router.py draw tensors that say which rows belong together.
# tests/ops/test_products.py draws numbers that say to which weight a column belongs. The rows of
# op_cases.py have scales for each column and for each sample, heads, and targets.
_OTHERS = {"splits", "scales", "positions", "expert_ids", "probs", "balance", "out_features"}
_OTHERS |= {"gamma", "factors", "head_dim", "target"}


def names() -> list[str]:
    """Every typed op of dense rows and one weight, and its variant that writes to a main_grad."""
    ops = torch.ops.transformer_ops
    dense = [n for n in PAIRS if not _OTHERS & {a.name for a in overload(n)._schema.arguments}]
    return sorted([*dense, *(f"{n}_into" for n in dense if hasattr(ops, f"{n}_into"))])


def overload(name: str) -> Any:
    return getattr(torch.ops.transformer_ops, name).default


class Sampler:
    """Draws one set of valid arguments."""

    ranks = 2  # of a collective

    def __init__(self, random: Random, name: str) -> None:
        self.random, self.name = random, name
        self.base = name.removesuffix("_into")
        self.dtype = random.choice(FLOATS)
        self.glu = self.base.removesuffix("_backward")
        self.draw_sizes()
        self.activation = random.choice(ACTIVATIONS)
        if self.base.startswith("activation_linear"):
            self.activation = random.choice(("relu", "srelu"))
        elif self.base.startswith("linear_activation"):
            self.activation = random.choice([a for a in ACTIVATIONS if a != "relu"])
        if self.base.startswith("relu"):
            self.activation = "relu"
        # With one element and a small eps, a gradient would only be rounding errors of terms that
        # cancel.
        self.eps = random.choice((1e-2, 0.1))
        self.p = random.choice((0.0, 0.25, 1.0))

    def is_collective(self) -> bool:
        fields = overload(self.name)._schema.arguments
        return any(field.name == "group_size" for field in fields)

    def size(self) -> int:
        large = self.random.random() < 0.05
        return (
            self.random.choice((300, 1024)) if large else self.random.choice((0, 1, 2, 3, 7, 8, 33))
        )

    def draw_sizes(self) -> None:
        self.lead = [self.size() for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)))]
        while math.prod(self.lead) > 4096:
            self.lead.pop()
        self.width, self.out = self.size(), self.size()
        # The dimensions that a norm treats as one row.
        self.row_dims = (
            2 if "_norm" in self.base and self.lead and self.random.random() < 0.2 else 1
        )
        if "l2_normalization" in self.base:
            self.row_dims = 1
        self.interleave = 0
        if self.is_collective() and self.lead:
            self.lead[0] *= self.ranks
        elif self.is_collective():
            self.width *= self.ranks
        if self.glu not in GLUS and "glu" not in self.base:
            return
        if self.glu not in GLUS:
            self.glu = self.random.choice(GLUS)
        if self.glu in ("swiglu", "situglu", "clamped_swiglu") or "linear_" in self.base:
            self.interleave = self.random.choice((0, 0, 1, 4))
        unit = 2 * max(1, self.interleave)
        if self.base == "linear_bias_glu":
            self.out *= unit
        else:
            self.width *= unit

    def arguments(self) -> list[Any]:
        schema = overload(self.name)._schema
        self.has_weight = any(argument.name == "weight" for argument in schema.arguments)
        input_ = self.tensor(*self.lead, self.width)
        self.values: dict[str, Any] = {"input": input_}
        return [self.value(argument.name, str(argument.type)) for argument in schema.arguments]

    def tensor(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes).to(dtype or self.dtype)

    def free_dtype(self) -> torch.dtype:
        return self.random.choice(FLOATS) if self.random.random() < 0.2 else self.dtype

    def value(self, name: str, kind: str) -> Any:
        epilogue = ("bias", "extra_input", "grad_extra_output")
        if kind == "Optional[Tensor]" and "_norm" in self.base and name in ("weight", "bias"):
            self.values.setdefault(name, None if self.random.random() < 0.3 else self.weight())
        if kind == "Optional[Tensor]" and name in epilogue and self.random.random() < 0.3:
            return None
        if name not in self.values:
            self.values[name] = (
                self.tensor_of(name) if "Tensor" in kind else self.constant(name, kind)
            )
        return self.values[name]

    def constant(self, name: str, kind: str) -> Any:
        if name == "group":
            return group_of_zeros(self.ranks).group_name
        if name == "group_size":
            return self.ranks
        if kind == "str":
            return self.glu if name == "glu" else self.activation
        if name == "normalized_shape":
            return [*self.lead, self.width][-self.row_dims :]
        lacks_weight = "_norm" in self.base and self.values.get("weight", self) is None
        if name == "zero_centered_gamma" and lacks_weight:
            return False
        if kind == "bool":
            return self.random.random() < 0.5
        if kind == "int":
            return self.interleave
        # The statistics of a norm depend on such a number, in every dtype.
        if kind in ("float", "Optional[float]"):
            known = {"eps": self.eps, "p": self.p}
            return known.get(name, self.random.choice((0.5, 1.0, 1.7)))
        assert kind.startswith("List[bool]"), kind
        mask = [
            self.random.random() < 0.7
            for _ in overload(self.name.removesuffix("_into"))._schema.returns
        ]
        if "residual" in self.base:
            mask[0] = True
        if lacks_weight:
            mask[1] = False
        return mask

    def is_product(self) -> bool:
        return "linear" in self.base

    def tensor_of(self, name: str) -> Tensor:
        made: dict[str, Callable[[], Tensor]] = {
            "grad_output": self.grad_output,
            "weight": self.weight,
            "main_grad": lambda: self.tensor(
                *self.weight().shape, dtype=self.random.choice(FLOATS)
            ),
            "bias": self.bias,
            "extra_input": self.extra_input,
            "grad_extra_output": lambda: self.tensor(
                *self.lead, self.width, dtype=self.free_dtype()
            ),
            "activated": self.activated,
            "kept": lambda: self.mask() if self.activation == "relu" else self.input_like(),
            "mask": self.mask,
            "mean": lambda: self.statistics()[0],
            "rstd": lambda: self.statistics()[1],
        }
        return made[name]()

    def input_like(self) -> Tensor:
        return self.tensor(*self.lead, self.width)

    def activated(self) -> Tensor:
        return torch.relu(self.input_like())

    def grad_output(self) -> Tensor:
        if self.name.startswith("recompute_"):
            return self.tensor(self.size(), dtype=self.free_dtype())
        width = self.width
        if self.is_product():
            width = self.out
        elif "glu" in self.base:
            width //= 2
        return self.tensor(*self.lead, width)

    def weight(self) -> Tensor:
        if not self.is_product():
            row = [*self.lead, self.width][-self.row_dims :]
            return self.tensor(*row, dtype=self.free_dtype())
        return self.tensor(
            self.out, self.width // 2 if self.base == "linear_glu_backward" else self.width
        )

    def bias(self) -> Tensor:
        if self.is_product():
            return self.tensor(self.out)
        row = [*self.lead, self.width][-self.row_dims :]
        return self.tensor(*row, dtype=self.free_dtype())

    def extra_input(self) -> Tensor:
        if self.is_product():
            return self.tensor(*self.lead, self.out)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dtypes = {
            "add_extra_input": self.free_dtype(),
            "bias_dropout_add": self.random.choice((self.dtype, wide)),
        }
        return self.tensor(*self.lead, self.width, dtype=dtypes.get(self.base, self.dtype))

    def mask(self) -> Tensor:
        return torch.randint(
            256, ((math.prod([*self.lead, self.width]) + 7) // 8,), dtype=torch.uint8
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        x = self.values["input"].to(torch.float64)
        if self.row_dims == 2:
            x = x.flatten(-2)
        squares = x.square().sum(-1)
        mean = x.mean(-1)
        if "layer_norm" in self.base:
            squares = (x - mean.unsqueeze(-1)).square().mean(-1)
        elif "rms_norm" in self.base:
            squares = x.square().mean(-1)
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return mean.to(dtype), torch.rsqrt(squares + self.eps).to(dtype)


# ---- other layouts of the same values


def transposed(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() < 2 else tensor.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(tensor: Tensor) -> Tensor:
    wide = torch.empty(*tensor.shape, 3, dtype=tensor.dtype, device=tensor.device)
    return wide[..., 1].copy_(tensor)


def off_the_grid(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def with_gaps(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    wide = torch.empty(
        *tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype, device=tensor.device
    )
    return wide[..., : tensor.shape[-1]].copy_(tensor)


LAYOUTS = (transposed, sliced, off_the_grid, with_gaps)


def expanded(tensor: Tensor) -> Tensor:
    """A tensor with other values: the first ones, repeated."""
    if tensor.dim() == 0 or tensor.shape[0] == 0:
        return tensor
    return tensor[:1].clone().expand(tensor.shape)


# ---- what may be wrong


def bad_sizes(random: Random, tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    kind = random.randrange(5)
    if kind == 0 or not shape:
        shape = [random.choice((0, 1, 2, 5)) for _ in range(random.randrange(5))]
    elif kind == 1:
        shape.pop(random.randrange(len(shape)))
    elif kind == 2:
        shape.insert(random.randrange(len(shape) + 1), random.choice((1, 2)))
    else:
        at = random.randrange(len(shape))
        shape[at] = random.choice((0, 1, shape[at] + 1, max(0, shape[at] - 1), 2 * shape[at]))
    return as_dtype(torch.ones(shape), tensor.dtype)


def bad_dtype(random: Random, tensor: Tensor) -> Tensor:
    return as_dtype(tensor, random.choice(DTYPES))


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the dtype, or integer zeros if torch does not cast to it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex halves are experimental
            return tensor.to(dtype)
    except (RuntimeError, TypeError):
        return torch.zeros(tensor.shape, dtype=torch.int64)


def without_memory(_: Random, tensor: Tensor) -> Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.untyped_storage().resize_(0)
    return copy


def special_values(random: Random, tensor: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS:
        return tensor
    return torch.full_like(tensor, random.choice((math.nan, math.inf, -math.inf, 0.0, 6e4)))


BAD_TENSORS: tuple[Callable[[Random, Tensor], Any], ...] = (
    bad_sizes,
    bad_sizes,
    bad_dtype,
    without_memory,
    special_values,
    lambda _, tensor: tensor.to("meta"),
    lambda _, tensor: None,
    lambda _, tensor: 1.0,
)
BAD_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "float": (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 1e-300, 2),
    "Optional[float]": (None, math.nan, math.inf, 0.0, -1.0, 1e300, 1e-300, 2, "1", True),
    "int": (0, 1, 3, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64, 1.5),
    "bool": (True, False, None, 2),
    "str": ("", "gelu", "GELU", "swiglu", "silu", "\0", "x" * 1000, "é", None),
    "List[bool]": ([], [True], [False], [True] * 2, [False] * 3, [True] * 5, True, None, [1, 0]),
}
