"""Random Sequentials, each with its reference in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from helpers import strided
from op_cases import CASES, OpCase
from op_references import layer_norm, lora_linear, packed_linear, rms_norm
from torch import Tensor, nn
from user_fusions import Gate, ScaleShift, SingleSquare

import transformer_ops as tops

WIDTHS = (8, 16, 32)
BATCHES = ((5,), (3,), (2, 3), (2, 1, 3), (1,), (0,), (2, 0), ())
# These are above 64 KiB in float64, so that the pool provides the memory.
LARGE = ((300,), (4, 130), (1100,))
# (x, extra inputs, parameters by name) -> (output, extra outputs...)
Meaning = Callable[[Tensor, list[Tensor], dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Features:
    """What a model may contain besides native ops."""

    python: bool = False
    plain: bool = False
    random: bool = False
    hooks: bool = False
    ties: bool = False
    layouts: bool = False


@dataclass
class Piece:
    """One module of a Sequential. `reads` has a channel or None for each extra input, `writes`
    (channel or None, whether the caller gets it) for each extra output."""

    module: nn.Module
    meaning: Meaning
    kind: str
    reads: list[str | None] = field(default_factory=list)
    writes: list[tuple[str | None, bool]] = field(default_factory=list)


@dataclass
class Model:
    module: tops.Sequential
    pieces: list[Piece]
    shapes: list[tuple[int, ...]]  # of the main input and of the extra inputs

    @property
    def has_python(self) -> bool:
        return any(piece.kind == "python" for piece in self.pieces)

    @property
    def draws(self) -> bool:
        """Whether it draws from torch's generator."""
        return any(isinstance(m, tops.Dropout) and 0 < m.p < 1 and m.training for m in self.module)

    def all_parameters(self) -> dict[str, Tensor]:
        """All parameters; a tied one is listed under each of its names."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    def meaning(self, tensors: list[Tensor], parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs in plain PyTorch; `parameters` as `all_parameters()` gives them."""
        x, extra = tensors[0], list(tensors[1:])
        outputs: list[Tensor] = []
        channels: dict[str, Tensor] = {}
        for i, piece in enumerate(self.pieces):
            start = f"{i}."
            own = {n.removeprefix(start): p for n, p in parameters.items() if n.startswith(start)}
            given = [channels[name] if name else extra.pop(0) for name in piece.reads]
            x, *made = piece.meaning(x, given, own)
            for (name, visible), tensor in zip(piece.writes, made, strict=True):
                if name is not None:
                    channels[name] = tensor
                if visible:
                    outputs.append(tensor)
        return (x, *outputs)

    def __str__(self) -> str:
        channels = [
            f"({i}) reads {piece.reads}, writes {piece.writes}"
            for i, piece in enumerate(self.pieces)
            if piece.reads or piece.writes
        ]
        return "\n".join([repr(self.module), *channels, f"inputs: {self.shapes}"])


# ---- meanings


def of_case(case: OpCase) -> Meaning:
    def meaning(x: Tensor, extra: list[Tensor], own: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found = case.reference(x, *extra, **own)
        return found if isinstance(found, tuple) else (found,)

    return meaning


def of(function: Callable[..., Tensor]) -> Meaning:
    return lambda x, extra, own: (function(x, **own),)


def dropped(p: float) -> Meaning:
    """Draws after the dropouts before it, as the op does."""

    def meaning(x: Tensor, extra: list[Tensor], own: dict[str, Tensor]) -> tuple[Tensor]:
        kept = tops.Dropout(p)(torch.ones(x.shape, dtype=x.dtype)) != 0
        return (torch.where(kept, x * (1 / (1 - p)) if p < 1 else x, 0),)

    return meaning


def scaled_and_shifted(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    mask = torch.arange(weight.numel()) % 3 > 0
    return x * (weight * mask * 1.5) + bias


def gated(x: Tensor, extra: list[Tensor], own: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return x * extra[0], x + 1, extra[0] * 2


# ---- pieces. What a row of op_cases.py says about shapes decides where it fits.

ROWS = {case.name: case for case in CASES}
SAME_WIDTH = [
    name for name, case in ROWS.items() if case.elementwise and not name.startswith("Dropout")
]
SAME_WIDTH += ["Dropout-eval", "Dropout-none", "L2Normalization"]
# Their extra inputs are not like the main one: numbers of rows, positions of rows.
_OTHERS = {name for name, case in ROWS.items() if case.extras is not None}
HALVING = [name for name in ROWS if "GLU" in name and name not in _OTHERS]
PARAMETERS = ["Linear", "Linear-no-bias", "BasicLinear", "Bias", "LayerNorm", "RMSNorm"]
PARAMETERS += ["PackedLinear", "PackedLinear-bias", "LoRALinear", "LoRALinear-two-of-three"]
PARAMETERS += ["LayerNorm-zero-centered", "RMSNorm-zero-centered"]
ROW_OF = {"LayerNorm-zero-centered": "LayerNorm-zero-centered-2d"}
ROW_OF |= {"RMSNorm-zero-centered": "RMSNorm-zero-centered-2d"}
_USED = {ROW_OF.get(name, name) for name in (*SAME_WIDTH, *HALVING, *PARAMETERS)}
# torch.func does not support collectives. With the eps of a dtype the reference in another one
# differs. The other ops are not in any model yet: drop path, layer scale, attention, and norms
# without some parameter.
_USED |= (
    _OTHERS
    | {name for name in ROWS if name.startswith(("DropPath", "LayerScale"))}
    | {name for name in ROWS if "-not-affine" in name or name == "LayerNorm-no-bias"}
    | {"RMSNorm-eps-of-the-dtype"}
    | {name for name in ROWS if name.startswith(("QKNorm", "Attention"))}
    | {name for name, case in ROWS.items() if case.distributed}
)
assert _USED | {"Dropout", "Dropout-all", "Reshape"} == set(ROWS), (
    "a row of op_cases.py has no place in models.py"
)


class Builder:
    """Appends pieces that fit what came before."""

    def __init__(self, rng: random.Random, features: Features, batch: tuple[int, ...]) -> None:
        self.rng, self.features, self.batch = rng, features, batch
        self.width = rng.choice(WIDTHS)
        self.shapes = [(*batch, self.width)]
        self.pieces: list[Piece] = []
        self.open: list[tuple[str, tuple[int, ...]]] = []
        self.squares = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, self.width)

    def add(self, module: nn.Module, meaning: Meaning, kind: str = "native") -> Piece:
        self.pieces.append(Piece(module, meaning, kind))
        return self.pieces[-1]

    def add_random(self) -> None:
        choices: list[tuple[float, Callable[[], None]]] = [
            (3, self.add_same_width),
            (2, self.add_halving),
            (4, self.add_product),
            (2, self.add_with_parameters),
            (1.5, self.add_extra_input),
            (1.5, self.add_extra_output),
            (0.5, self.add_reshape),
        ]
        if self.features.random:
            choices.append((1, self.add_dropout))
        if self.features.plain:
            choices.append((1, self.add_plain))
        if self.features.python:
            choices.append((2.5, self.add_python))
        weights, makers = zip(*choices, strict=True)
        self.rng.choices(makers, weights)[0]()

    def add_same_width(self) -> None:
        name = self.rng.choice(SAME_WIDTH)
        if name in ("AddExtraInput", "MakeExtraOutput"):
            return
        if name == "SReLU":
            self.squares += 1
            if self.squares > 2:  # beyond, the numbers overflow
                return
        self.add(ROWS[name].make(), of_case(ROWS[name]))

    def add_halving(self) -> None:
        if self.width < 16:
            self.add_product()
            return
        name = self.rng.choice(HALVING)
        self.add(ROWS[name].make(), of_case(ROWS[name]))
        self.width //= 2

    def add_product(self) -> None:
        op: tops.FusibleOperation
        name = self.rng.choice(["Linear", "Linear", "Linear-no-bias", "BasicLinear"])
        out = self.rng.choice(WIDTHS)
        if self.rng.random() < 0.2:
            first = self.rng.randrange(1, out)
            bias = self.rng.random() < 0.5
            sizes = (first, out - first)
            if self.rng.random() < 0.3:
                op = tops.LoRALinear(self.width, sizes, (2, 1), scaling=0.5, bias=bias)
                self.add(op.requires_grad_(), of(lora_linear((0, 1), (0.5, 0.5))))
            else:
                op = tops.PackedLinear(self.width, sizes, bias=bias)
                self.add(op, of(packed_linear))
            self.width = out
            return
        if name == "BasicLinear":
            op = tops.BasicLinear(self.width, out)
        else:
            op = tops.Linear(self.width, out, bias=name == "Linear")
        self.add(op, of(F.linear))
        self.width = out

    def add_with_parameters(self) -> None:
        name = self.rng.choice(["Bias", "LayerNorm", "RMSNorm"])
        if name == "Bias":
            self.add(tops.Bias(self.width), of(lambda x, bias: x + bias))
            return
        centered, eps = self.rng.random() < 0.3, self.rng.choice([1e-5, 0.1])
        op = getattr(tops, name)(self.width, eps=eps, zero_centered_gamma=centered)
        self.add(op, of({"LayerNorm": layer_norm, "RMSNorm": rms_norm}[name](eps, centered)))

    def add_dropout(self) -> None:
        p = self.rng.choice([0.1, 0.5, 1.0])
        self.add(tops.Dropout(p), dropped(p))

    def add_reshape(self) -> None:
        self.add(tops.Reshape((-1, self.width)), of(lambda x, w=self.width: x.reshape(-1, w)))
        rows = 1
        for size in self.batch:
            rows *= size
        self.batch = (rows,)

    def add_plain(self) -> None:
        name = self.rng.choice(["tanh", "linear", "norm", "nested"])
        if name == "tanh":
            self.add(nn.Tanh(), of(torch.tanh), "plain")
        elif name == "linear":
            out = self.rng.choice(WIDTHS)
            self.add(nn.Linear(self.width, out), of(F.linear), "plain")
            self.width = out
        elif name == "norm":
            self.add(nn.LayerNorm(self.width), of(layer_norm()), "plain")
        else:
            inner = tops.Sequential(tops.Bias(self.width), tops.SiLU())
            self.add(inner, lambda x, extra, own: (F.silu(x + own["0.bias"]),), "plain")

    def add_python(self) -> None:
        name = self.rng.choice(["ScaleShift", "SingleSquare", "Gate"])
        if name == "ScaleShift":
            self.add(ScaleShift(self.width), of(scaled_and_shifted), "python")
        elif name == "Gate":
            piece = self.add(Gate(), gated, "python")
            self.read_extra(piece)
            self.write_extra(piece)
            self.write_extra(piece)
        elif self.squares < 2:
            self.squares += 1
            self.add(SingleSquare(), of(lambda x: x * x), "python")

    def add_extra_input(self) -> None:
        self.read_extra(self.add(tops.AddExtraInput(), of_case(ROWS["AddExtraInput"])))

    def add_extra_output(self) -> None:
        op = tops.MakeExtraOutput(in_place=self.rng.random() < 0.2)
        self.write_extra(self.add(op, of_case(ROWS["MakeExtraOutput"])))

    def read_extra(self, piece: Piece) -> None:
        fitting = [name for name, shape in self.open if shape == self.shape]
        if not fitting or self.rng.random() < 0.3:
            piece.reads.append(None)
            self.shapes.append(self.shape)
            return
        name = self.rng.choice(fitting)
        piece.module.set_extra_input_channel(0, name)
        piece.reads.append(name)

    def write_extra(self, piece: Piece) -> None:
        index = len(piece.writes)
        if self.rng.random() < 0.2:
            piece.writes.append((None, True))
            return
        name, visible = f"c{len(self.pieces)}.{index}", self.rng.random() < 0.4
        piece.module.set_extra_output_channel(index, name, output_to_caller=visible)
        piece.writes.append((name, visible))
        self.open.append((name, self.shape))


def random_model(
    rng: random.Random,
    features: Features,
    *,
    longest: int = 9,
    batches: tuple[tuple[int, ...], ...] = BATCHES,
    dtype: torch.dtype = torch.float64,
) -> Model:
    """A model whose parameters are drawn from torch's generator."""
    builder = Builder(rng, features, rng.choice(batches))
    for _ in range(rng.randint(1, longest)):
        builder.add_random()
    if not builder.pieces:
        builder.add_product()
    pieces = builder.pieces
    recompute = rng.choice(["cheap", "cheap", "none", "products"])
    module = tops.Sequential(*(piece.module for piece in pieces), recompute=recompute).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    if features.layouts and rng.random() < 0.25:
        make_strided(module, rng)
    if features.ties and rng.random() < 0.3:
        tie_weights(module, rng)
    if features.hooks and rng.random() < 0.2:
        rng.choice(list(module)).register_forward_hook(keep_output)
    return Model(module, pieces, builder.shapes)


def keep_output(module: nn.Module, inputs: object, output: object) -> None:
    """A hook that changes nothing, but keeps an op out of larger groups."""


def make_strided(module: nn.Module, rng: random.Random) -> None:
    """Turns some parameters into columns of a larger tensor."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and rng.random() < 0.5:
                owner._parameters[name] = nn.Parameter(strided(parameter.detach()))


def tie_weights(module: tops.Sequential, rng: random.Random) -> None:
    """Makes two products of one shape share their weight, if there are two."""
    products = [m for m in module if isinstance(m, tops.Linear | tops.BasicLinear)]
    rng.shuffle(products)
    for i, one in enumerate(products):
        for other in products[:i]:
            if one.weight.shape == other.weight.shape:
                one.weight = other.weight
                return
