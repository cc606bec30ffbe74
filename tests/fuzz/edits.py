"""Modules that are edited after they ran must give the same as a new copy, and as each op alone."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable

import torch
from helpers import strided
from torch import Tensor, nn
from user_fusions import SingleSquare

import transformer_ops as tops

from .compare import Results, assert_all_near, gradients
from .errors import assert_clear

ISOLATED = False

WIDTH = 8
EDITS_A_SEED = 8
Edit = Callable[[tops.Sequential, random.Random], None]


class LowRank(tops.Linear):
    """A Linear whose `forward` adds a product of low rank, as adapters do."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.down = nn.Parameter(torch.randn(2, in_features))
        self.up = nn.Parameter(torch.randn(out_features, 2))

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: object) -> Tensor:
        return super().forward(input) + input @ self.down.T @ self.up.T


MAKERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: tops.Linear(WIDTH, WIDTH),
    lambda: tops.Linear(WIDTH, WIDTH, bias=False),
    lambda: tops.BasicLinear(WIDTH, WIDTH),
    lambda: tops.Bias(WIDTH),
    lambda: tops.LayerNorm(WIDTH),
    lambda: tops.RMSNorm(WIDTH),
    lambda: tops.ConstantScale(0.5),
    lambda: tops.Dropout(0.2),
    tops.GELU,
    tops.ReLU,
    tops.SiLU,
    tops.Identity,
    nn.Tanh,
    SingleSquare,
    lambda: LowRank(WIDTH, WIDTH),
)


def new_op(rng: random.Random) -> nn.Module:
    return rng.choice(MAKERS)().double()


# ---- edits


def values(rng: random.Random) -> object:
    number = rng.choice([0, 1, 0.0, 1.0, 0.25, 0.5, True, False])
    if rng.random() < 0.2:
        return torch.tensor(number)
    return rng.choice([number, number, number, 2, -1.0, float("nan"), None, "text", 10**400])


def set_attribute(module: tops.Sequential, rng: random.Random) -> None:
    places = [
        (op, name)
        for op in module
        for name in ("eps", "scale", "p", "zero_centered_gamma")
        if isinstance(op, tops.FusibleOperation) and hasattr(op, name)
    ]
    if places:
        op, name = rng.choice(places)
        setattr(op, name, values(rng))


def linears(module: tops.Sequential) -> list[tops.Linear]:
    return [op for op in module if isinstance(op, tops.Linear)]


def set_bias(module: tops.Sequential, rng: random.Random) -> None:
    if found := linears(module):
        bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        rng.choice(found).bias = rng.choice([None, bias])


def replace_weight(module: tops.Sequential, rng: random.Random) -> None:
    if found := linears(module):
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
        rng.choice(found).weight = nn.Parameter(rng.choice([weight, strided(weight), weight.T]))


def change_data(module: tops.Sequential, rng: random.Random) -> None:
    if found := list(module.parameters()):
        parameter = rng.choice(found)
        parameter.data = strided(parameter.data) if rng.random() < 0.5 else parameter.data * 2


def freeze(module: tops.Sequential, rng: random.Random) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(rng.random() < 0.7)


def switch_mode(module: tops.Sequential, rng: random.Random) -> None:
    (module if rng.random() < 0.5 else rng.choice(list(module))).train(rng.random() < 0.5)


def replace_op(module: tops.Sequential, rng: random.Random) -> None:
    module[rng.randrange(len(module))] = new_op(rng)


def insert_op(module: tops.Sequential, rng: random.Random) -> None:
    module.insert(rng.randint(0, len(module)), new_op(rng))


def drop_op(module: tops.Sequential, rng: random.Random) -> None:
    if len(module) > 1:
        del module[rng.randrange(len(module))]


def add_hook(module: tops.Sequential, rng: random.Random) -> None:
    op = rng.choice(list(module))
    if rng.random() < 0.5:
        op.register_forward_hook(lambda module, inputs, output: output * 2)
    else:
        op.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def clear_hooks(module: tops.Sequential, rng: random.Random) -> None:
    for op in module:
        if rng.random() < 0.5:
            op._forward_hooks = OrderedDict()
            op._forward_pre_hooks = OrderedDict()
        else:
            op._forward_hooks.clear()
            op._forward_pre_hooks.clear()


def set_forward(module: tops.Sequential, rng: random.Random) -> None:
    op = rng.choice(list(module))
    op.forward = rng.choice([torch.sin, lambda input: input * 3])


def unset_forward(module: tops.Sequential, rng: random.Random) -> None:
    for op in module:
        op.__dict__.pop("forward", None)


def set_policy(module: tops.Sequential, rng: random.Random) -> None:
    module.recompute = rng.choice(["cheap", "none", "products"])


EDITS: tuple[Edit, ...] = (
    set_attribute,
    set_attribute,
    set_bias,
    replace_weight,
    change_data,
    freeze,
    switch_mode,
    replace_op,
    insert_op,
    drop_op,
    add_hook,
    clear_hooks,
    set_forward,
    unset_forward,
    set_policy,
)


# ---- what an edited module must give


def results(
    module: tops.Sequential, call: Callable[[Tensor], Tensor], seed: int
) -> Results | Exception:
    """The output and gradients, or the error."""
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    torch.manual_seed(seed)
    try:
        output = call(x)
        leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
        return [output, *gradients([output], leaves, [torch.ones_like(output)])]
    except Exception as error:
        return error


def one_by_one(module: tops.Sequential) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        for op in module:
            x = op(x)
        return x

    return call


def check(module: tops.Sequential, seed: int) -> int:
    got = results(module, module, seed)
    new = copy.deepcopy(module)
    count = 0
    for what, want in (
        ("a new copy", results(new, new, seed)),
        ("each op alone", results(module, one_by_one(module), seed)),
    ):
        if isinstance(got, Exception) or isinstance(want, Exception):
            raised = isinstance(got, Exception) and isinstance(want, Exception)
            assert raised, f"{got!r} where {what} gives {want!r}"
            assert_clear(got)
            count += 1
        else:
            finite = [w if w is None else w.nan_to_num(0.5, 2.0, -2.0) for w in want]
            found = [g if g is None else g.nan_to_num(0.5, 2.0, -2.0) for g in got]
            count += assert_all_near(found, finite, what)
    return count


def described(module: tops.Sequential) -> str:
    """A description without repr, which an odd attribute may break."""
    names = ("eps", "scale", "p", "zero_centered_gamma", "training")
    return "\n".join(
        f"{type(op).__name__} { ({n: getattr(op, n) for n in names if hasattr(op, n)}) }"
        for op in module
    )


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module = tops.Sequential(*(new_op(rng) for _ in range(rng.randint(1, 6))))
    done: list[str] = []
    count = 0
    for step in range(EDITS_A_SEED):
        try:
            count += check(module, seed + step)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {done}\n{described(module)}") from error
        edit = rng.choice(EDITS)
        done.append(edit.__name__)
        try:
            edit(module, rng)
        except (TypeError, ValueError, RuntimeError) as error:  # refused: it must stay as it was
            assert_clear(error)
    return count
