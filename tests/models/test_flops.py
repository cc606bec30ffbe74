"""`torch.utils.flop_counter.FlopCounterMode` counts the products of typed ops as torch's own."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_import import run_fresh
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from typed_op_samples import NAMES, overload, samples

import transformer_ops as tops
from transformer_ops import _C, recipe
from transformer_ops.reports import flops

pytestmark = pytest.mark.takes(seconds=25)

COUNTED = {name.partition("::")[2] for name, *_ in _C.counted_ops()}


def count(function: Callable[..., Any], *args: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


def with_masks(name: str, sample: list[Any]) -> list[list[Any]]:
    """The sample with every output mask that asks for something."""
    names = [argument.name for argument in overload(name)._schema.arguments]
    if "output_mask" not in names:
        return [sample]
    place = names.index("output_mask")
    masks = itertools.product([False, True], repeat=len(sample[place]))
    # The tensors for gradients that a sample does not ask for may be missing.
    fits = (m for m in masks if any(m) and (all(sample[place]) or list(m) == sample[place]))
    return [[*sample[:place], list(mask), *sample[place + 1 :]] for mask in fits]


# The decompositions of these compute scores and logits again, and that of the loss makes no
# gradients. Two tests below count them.
BY_LAYERS = {"router_backward", "linear_cross_entropy", "linear_cross_entropy_backward"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_LAYERS])
def test_each_typed_op_counts_what_its_decomposition_counts(name: str) -> None:
    # The meaning of a product in groups multiplies all rows with every matrix.
    multiplies_more = "grouped" in name or "moe_mlp" in name
    for sample in samples(name, torch.float32):
        for arguments in with_masks(name, sample):
            found = count(overload(name), *arguments)
            wanted = count(_C.decomposition, name, tuple(arguments))
            if name == "attention_backward":
                # That runs forward again as a whole; the op makes the scores alone, as torch's.
                assert found * 6 == wanted * 5
            elif multiplies_more:
                assert found <= wanted and (found > 0) == (wanted > 0)
            else:
                assert found == wanted
            assert found == 0 or name in COUNTED


def test_the_counted_ops_are_those_that_multiply() -> None:
    assert COUNTED >= {"linear", "packed_linear_backward_into", "grouped_mlp", "gather_linear"}
    other = {form for form in COUNTED if form.rpartition("_")[2] in ("into", "scaled")}
    assert COUNTED - other <= set(NAMES)
    for name in COUNTED - other:
        totals = [
            count(overload(name), *arguments)
            for sample in samples(name, torch.float32)
            for arguments in with_masks(name, sample)
        ]
        assert any(totals), name


# ---- modules against those of torch


class Experts(nn.Module):
    """One of torch's products for each expert, with the rows that it gets."""

    def __init__(self, splits: list[int], count: int = 1) -> None:
        super().__init__()
        self.splits = splits
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(count))) for _ in splits
        )

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        parts = x.split([*self.splits, len(x) - sum(self.splits)])
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=False)])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, width) for width in (16, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def grouped_mlp() -> tops.Sequential:
    up = tops.GroupedLinear(3, 16, 32, bias=False)
    return tops.Sequential(up, tops.ScaledSwiGLU(), tops.GroupedLinear(3, 16, 16, bias=False))


class GatedExperts(nn.Module):
    def __init__(self, splits: list[int]) -> None:
        super().__init__()
        self.splits = splits
        self.up = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in splits)
        self.down = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in splits)

    def forward(self, x: Tensor, _splits: Tensor, scales: Tensor, _again: Tensor) -> Tensor:
        parts = zip(
            x.split(self.splits), scales.split(self.splits), self.up, self.down, strict=True
        )
        return torch.cat([d(nn.functional.glu(u(x)) * s[:, None]) for x, s, u, d in parts])


SPLITS = [4, 0, 8]
# name -> (ops, modules of torch, extra inputs)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[Tensor]]] = {
    "product": (lambda: tops.Linear(16, 32), lambda: nn.Linear(16, 32), []),
    "product without bias": (
        lambda: tops.Linear(16, 32, bias=False),
        lambda: nn.Linear(16, 32, bias=False),
        [],
    ),
    "activation": (
        lambda: tops.Sequential(
            tops.RMSNorm(16), tops.Linear(16, 64), tops.GELU(), tops.Linear(64, 16)
        ),
        lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),
        [],
    ),
    "mask": (
        lambda: tops.Sequential(tops.Linear(16, 64), tops.ReLU(), tops.Linear(64, 16, bias=False)),
        lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16, bias=False)),
        [],
    ),
    "gated": (
        lambda: tops.Sequential(tops.Linear(16, 64), tops.SwiGLU(), tops.Linear(32, 16)),
        Gated,
        [],
    ),
    "residual and scale": (
        lambda: tops.Residual(tops.LayerNorm(16), tops.Linear(16, 16), tops.ConstantScale(0.5)),
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)),
        [],
    ),
    "packed": (lambda: tops.PackedLinear(16, (16, 8, 8)), Packed, []),
    "groups": (
        lambda: tops.GroupedLinear(3, 16, 16, bias=False),
        lambda: Experts(SPLITS),
        [torch.tensor(SPLITS)],
    ),
    "groups with rows left over": (
        lambda: tops.GroupedLinear(3, 16, 16, bias=True),
        lambda: Experts([3, 0, 5]),
        [torch.tensor([3, 0, 5])],
    ),
    "experts": (
        grouped_mlp,
        lambda: GatedExperts(SPLITS),
        [torch.tensor(SPLITS), torch.rand(12), torch.tensor(SPLITS)],
    ),
}


def run(module: Callable[..., Tensor], *inputs: Tensor, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        output = module(*inputs)
    if backward:
        output.sum().backward()


@pytest.mark.parametrize("frozen", ["nothing", "input", "weights"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, backward: bool, frozen: str) -> None:
    make, make_plain, extra = FAMILIES[family]
    counts = []
    for module in (make(), make_plain()):
        module.requires_grad_(frozen != "weights")
        x = torch.randn(12, 16, requires_grad=backward and frozen != "input")
        counts.append(count(lambda *xs, m=module: run(m, *xs, backward=backward), x, *extra))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("family", ["activation", "gated", "packed", "groups", "experts"])
def test_compiled(family: str) -> None:
    """Dynamo takes no frame in a dispatch mode, whose code runs as it is."""
    make, make_plain, extra = FAMILIES[family]
    module = make()
    module.compile(backend="aot_eager")
    x = torch.randn(12, 16, requires_grad=True)
    run(module, x, *extra, backward=True)
    found = count(lambda: run(module, x, *extra, backward=True))
    assert found == count(lambda: run(make_plain(), x, *extra, backward=True)) > 0


def test_exported() -> None:
    make, make_plain, _ = FAMILIES["activation"]
    module, x = make(), torch.randn(12, 16)
    wanted = count(make_plain(), x)
    program = torch.export.export(module, (x,))
    assert count(program.module(), x) == wanted
    assert count(program.run_decompositions().module(), x) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_without_data(family: str) -> None:
    """Sizes are enough. In groups, all rows count, since nobody knows the splits."""
    make, _, extra = FAMILIES[family]
    module, x = make(), torch.randn(12, 16)
    wanted = count(lambda: run(module, x, *extra, backward=True))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, [x, *extra])
        found = count(lambda: run(module, *fake, backward=True))
    assert found == wanted * (1.5 if "left over" in family else 1)


def layer_of_experts(experts: int, top_k: int) -> tops.Sequential:
    router = tops.Router(16, experts, top_k)
    for k, channel in enumerate(("expert_ids", "probs", None)):
        router.set_extra_output_channel(k, channel, output_to_caller=False)
    dispatch = tops.Dispatch(experts)
    dispatch.set_extra_input_channel(0, "expert_ids").set_extra_input_channel(1, "probs")
    for k, channel in enumerate(("splits", "permuted_probs", "positions")):
        dispatch.set_extra_output_channel(k, channel, output_to_caller=False)
    up = tops.GroupedLinear(experts, 16, 32, bias=False)
    down = tops.GroupedLinear(experts, 16, 16, bias=False)
    return tops.Sequential(
        router,
        dispatch,
        up.set_extra_input_channel(0, "splits"),
        tops.ScaledSwiGLU().set_extra_input_channel(0, "permuted_probs"),
        down.set_extra_input_channel(0, "splits"),
        tops.Combine().set_extra_input_channel(0, "positions"),
    )


@pytest.mark.parametrize("fake", [False, True])
def test_a_layer_of_experts(fake: bool) -> None:
    tokens, experts, top_k = 6, 4, 2
    module = layer_of_experts(experts, top_k)
    products = 2 * tokens * (16 * experts + top_k * (16 * 32 + 16 * 16))
    x = torch.randn(tokens, 16, requires_grad=True)
    if fake:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(x)
            assert count(lambda: run(module, x, backward=True)) == 3 * products
    else:
        assert count(lambda: run(module, x, backward=False)) == products
        assert count(lambda: run(module, x, backward=True)) == 3 * products
        text = str(module.plans()[0])
        assert "moe_mlp" in text and "moe_mlp_backward" in text


@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_and_its_loss(gradients_in: str, frozen: bool) -> None:
    """Logits that are computed again do not count, as in a model without chunks."""
    op = tops.LinearCrossEntropy(16, 21, gradients_in=gradients_in)
    op.weight.requires_grad_(not frozen)
    x, target = torch.randn(6, 16, requires_grad=True), torch.arange(6)
    product = 2 * 6 * 16 * 21
    with torch.no_grad():
        assert count(lambda: op(x, target)) == product
    assert count(lambda: op(x, target).backward()) == (2 if frozen else 3) * product


RECIPES = {
    "fp8": recipe.Float8CurrentScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    module = tops.Sequential(tops.Linear(64, 128), tops.GELU(), tops.Linear(128, 64)).bfloat16()
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    wanted = count(lambda: run(module, x, backward=True))
    with tops.autocast(recipe=RECIPES[name]()):
        assert count(lambda: run(module, x, backward=True)) == wanted > 0


def test_pairs_of_codes() -> None:
    """A byte holds two numbers, of two columns or of two rows."""
    ops, rows, k, n = torch.ops.transformer_ops, 32, 64, 48
    x, w, g = (torch.randn(shape) for shape in ((rows, k), (n, k), (rows, n)))
    tensors = {"x": x, "w": w, "g": g}
    by_rows = {name: ops.quantize(t, "nvfp4") for name, t in tensors.items()}
    by_columns = {name: ops.quantize_columns(t, "nvfp4 16x1") for name, t in tensors.items()}
    product = 2 * rows * k * n
    (a, b), (c, d) = by_rows["x"], by_rows["w"]
    assert a.dtype == torch.uint8 and a.shape == (rows, k // 2)
    assert count(ops.linear_scaled, a, c, b, d) == product
    (a, b), (c, d) = by_rows["g"], by_columns["w"]
    assert count(ops.linear_backward_scaled, a, None, c, [True, False], b, d) == product
    (a, b), (c, d) = by_columns["g"], by_columns["x"]
    assert count(ops.linear_backward_scaled, a, c, None, [False, True], b, d) == product
    into = (torch.zeros(n, k), False)
    into_op = ops.linear_backward_scaled_into
    assert count(into_op, a, c, None, [False, True], b, d, *into) == product


def test_gradients_that_accumulate() -> None:
    module = tops.Linear(16, 32, accumulate_into_main_grad=True)
    module.weight.main_grad = torch.zeros(32, 16)
    x = torch.randn(12, 16, requires_grad=True)
    assert count(lambda: run(module, x, backward=True)) == 3 * 2 * 12 * 32 * 16


# ---- registration


def test_the_import_of_the_counter_brings_the_formulas() -> None:
    """Before that of the package, after it, and both. Each in a copy of a process with torch."""
    load = "import torch.utils.flop_counter"
    unloaded = f'assert "torch.utils.flop_counter" not in sys.modules\n{load}'
    code = f"""
import os, sys, torch
for before, after in (({load!r}, ""), ("", {unloaded!r}), ({load!r}, {load!r})):
    if os.fork() == 0:
        exec(before)
        import transformer_ops as tops
        exec(after)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            tops.Linear(16, 32)(torch.randn(4, 16))
        print(counter.get_total_flops())
        break
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    assert [int(line) for line in run_fresh(code).split()] == 3 * [2 * 4 * 32 * 16]


def test_registering_again_changes_nothing() -> None:
    counter = torch.utils.flop_counter
    before = dict(counter.flop_registry)
    flops.register()
    assert counter.flop_registry == before
