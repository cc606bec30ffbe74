"""Blocks of one kind that are compiled one by one share a graph, as in plain torch; blocks that
differ in anything that a graph depends on do not."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import fuse_models
import pytest
import torch
import user_fusions
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=25)

isolates_recompiles = pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="needs a torch that counts the recompilations of each torch.compile call separately",
)

# More than torch._dynamo.config.recompile_limit.
COUNT = 10


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def norm_mlp() -> tops.Sequential:
    modules = (tops.LayerNorm(8), tops.Linear(8, 16), tops.GELU(), tops.Linear(16, 8))
    return tops.Sequential(*modules)


class OpsAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = tops.RMSNorm(8), tops.Linear(8, 8), tops.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Block(nn.Module):
    """A residual block as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = tops.LayerNorm(8), norm_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class WithFuser(nn.Module):
    """A group of one's own, without a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = tops.Linear(8, 8), tops.SiLU()
        self.group = tops.OperationFuser([self.linear, self.act])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.group(x)
        return found


def fused_layer() -> nn.Module:
    layer = fuse_models.DecoderLayer(8, 16)
    tops.fuse(layer)
    return layer


def with_a_plain_module() -> tops.Sequential:
    return tops.Sequential(tops.Linear(8, 8), nn.Tanh(), tops.Linear(8, 8))


def with_a_channel() -> tops.Sequential:
    make, add = tops.MakeExtraOutput(), tops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return tops.Sequential(make, tops.Linear(8, 8), tops.SiLU(), add)


def compiled(blocks: list[Any]) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    return counter


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = block(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *block.parameters()])]


def check(blocks: list[nn.Module], plain: list[nn.Module]) -> None:
    x = torch.randn(4, 8)
    for block, wanted in zip(blocks, plain, strict=True):
        torch.testing.assert_close(gradients(block, x), gradients(wanted, x))


@pytest.mark.parametrize(
    "make",
    [norm_mlp, OpsAlone, Block, WithFuser, with_a_plain_module, with_a_channel, fused_layer],
)
def test_equal_blocks_share_a_graph(make: Callable[[], nn.Module]) -> None:
    blocks = [make() for _ in range(COUNT)]
    plain = copy.deepcopy(blocks)
    counter = compiled(blocks)
    check(blocks, plain)
    assert counter.frame_count == 1


def change_nothing_else(blocks: list[Any]) -> None:
    blocks[3][1].weight = nn.Parameter(torch.randn(16, 8))
    blocks[4].load_state_dict(blocks[0].state_dict())
    blocks[5].to(torch.float32)


def change_eps(blocks: list[Any]) -> None:
    blocks[3][0].eps = 0.5


def change_recompute(blocks: list[Any]) -> None:
    blocks[3].recompute = "none"


def change_an_op(blocks: list[Any]) -> None:
    blocks[3][2] = tops.SiLU()


def take_a_bias(blocks: list[Any]) -> None:
    blocks[3][1].bias = None


def add_a_hook(blocks: list[Any]) -> None:
    blocks[3][2].register_forward_hook(lambda module, given, output: output * 2)


CHANGES = [
    change_eps,
    change_recompute,
    change_an_op,
    take_a_bias,
    add_a_hook,
    change_nothing_else,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_that_differs_runs_a_graph_of_its_own(change: Any, when: str) -> None:
    blocks = [norm_mlp() for _ in range(6)]
    counter = compiled(blocks)
    if when == "after":
        check(blocks, [copy.deepcopy(block) for block in blocks])
        assert counter.frame_count == 1
    change(blocks)
    plain = [norm_mlp() for _ in blocks]
    change(plain)
    for one, other in zip(blocks, plain, strict=True):
        other.load_state_dict(one.state_dict())
    check(blocks, plain)
    # An edit makes the graph of the edited block anew.
    edited = change is not change_nothing_else or when == "after"
    assert counter.frame_count <= 1 + edited


def test_flags_of_tensors_and_modes_are_those_of_each_block() -> None:
    def make() -> tops.Sequential:
        return tops.Sequential(tops.Linear(8, 8), tops.Dropout(1.0), tops.Linear(8, 8))

    blocks = [make() for _ in range(6)]
    compiled(blocks)
    blocks[1].eval()
    blocks[2][0].weight.requires_grad_(False)
    blocks[3][0].weight = blocks[3][2].weight
    x = torch.randn(4, 8)
    plain = copy.deepcopy(blocks)
    for block, wanted in zip(blocks, plain, strict=True):
        for module in (block, wanted):
            module.zero_grad()
            module(x).square().sum().backward()
        torch.testing.assert_close(block(x), wanted(x))
        for got, want in zip(block.parameters(), wanted.parameters(), strict=True):
            # A compiled graph gives zeros for None, in plain torch too.
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (got, want)]
            torch.testing.assert_close(*grads)


def a_path(number: float) -> tops.Sequential:
    return tops.Residual(tops.Linear(8, 8), tops.DropPath(number))


def a_scale(number: float) -> tops.Sequential:
    return tops.Sequential(tops.LayerNorm(8), tops.ConstantScale(number))


class ScaledBlock(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.mlp = a_scale(number)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(x)
        return found


@isolates_recompiles
@pytest.mark.parametrize("make", [a_path, a_scale, ScaledBlock])
def test_blocks_that_differ_in_a_number_have_limits_of_their_own(make: Any) -> None:
    blocks = [make(i / 20) for i in range(1, COUNT + 3)]
    plain = copy.deepcopy(blocks)
    for block in blocks:
        # Torch's own blocks need the argument, too.
        options = {"isolate_recompiles": True} if make is ScaledBlock else {}
        block.compile(backend="aot_eager", fullgraph=True, **options)
    for block in (*blocks, *plain):
        block.train(make is not a_path)
    check(blocks, plain)


def test_a_compiled_sequential_is_traced_into_the_graph_around_it() -> None:
    block = Block()
    plain = copy.deepcopy(block)
    compiled([block.mlp])
    check([block.mlp], [plain.mlp])
    counter = compiled([block])
    check([block], [plain])
    assert counter.frame_count == 1


def a_number(module: Any, is_odd: bool) -> None:
    module[0].eps = 1e-3 if is_odd else 1e-5


def an_op(module: Any, is_odd: bool) -> None:
    module[2] = tops.SiLU() if is_odd else tops.GELU()


def a_policy(module: Any, is_odd: bool) -> None:
    module.recompute = "none" if is_odd else "cheap"


def a_hook(module: Any, is_odd: bool) -> None:
    module[2]._forward_hooks.clear()
    if is_odd:
        module[2].register_forward_hook(lambda module, given, output: output * 2)


def with_a_python_op() -> tops.Sequential:
    return tops.Sequential(tops.LayerNorm(8), Twice(2.0), tops.Linear(8, 8))


CYCLES = [(norm_mlp, edit) for edit in (a_number, an_op, a_policy, a_hook)]
CYCLES.append((with_a_python_op, a_number))


@pytest.mark.parametrize("make, edit", CYCLES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_state_that_comes_back_finds_its_graph(make: Any, edit: Any, backend: str) -> None:
    module = make()
    module.compile(backend=backend, fullgraph=True)
    for i in range(2 * COUNT):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            edit(module, bool(i % 2))
            plain = copy.deepcopy(module)
            check([module], [plain])
            assert str(module.plans()) == str(plain.plans())


@pytest.mark.parametrize("make", [norm_mlp, lambda: tops.Linear(8, 8), Block])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_compiled_module_runs_its_own_weights(make: Any, duplicate: Any) -> None:
    module, x = make(), torch.randn(4, 8)
    compiled([module])
    before = module(x)
    other = duplicate(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    wanted = make()
    wanted.load_state_dict(other.state_dict())
    assert torch.equal(other(x), wanted(x))
    assert torch.equal(module(x), before)


def test_a_graph_outlives_the_block_that_it_was_made_for() -> None:
    blocks = [norm_mlp() for _ in range(4)]
    plain = copy.deepcopy(blocks)
    counter = compiled(blocks)
    check(blocks[:1], plain[:1])
    del blocks[0], plain[0]
    gc.collect()
    check(blocks, plain)
    x = torch.randn(2, 3, 8)
    for block, wanted in zip(blocks, plain, strict=True):
        torch.testing.assert_close(block(x), wanted(x))
    assert counter.frame_count <= 3


def test_explain_of_a_block_that_runs_the_graph_of_another() -> None:
    blocks = [norm_mlp() for _ in range(3)]
    compiled(blocks)
    for block in blocks:
        block(torch.randn(4, 8))
    texts = {str(block.explain()) for block in blocks}
    assert len(texts) == 1 and "linear_bias_activation" in texts.pop()
    assert [str(plan) for plan in blocks[2].plans()] == [str(plan) for plan in blocks[0].plans()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_python_fusions_keep_to_their_own_modules(backend: str) -> None:
    def make() -> tops.Sequential:
        return tops.Sequential(tops.BasicLinear(8, 8), tops.SiLU(), tops.Bias(8))

    blocks = [make() for _ in range(4)]
    fuse = user_fusions.replacing(user_fusions.JointSplit, tops.BasicLinear, tops.SiLU)
    plain = [
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU(), AddBias(block[2].bias))
        for block in blocks
    ]
    for block, wanted in zip(blocks, plain, strict=True):
        wanted[0].weight.data.copy_(block[0].weight.data)
        block.compile(backend=backend, fullgraph=True)
    check(blocks, plain)
    with tops.register_forward_backward_fusion(fuse):
        check(blocks, plain)
        gone = blocks.pop(0), plain.pop(0)
        del gone
        gc.collect()
        check(blocks, plain)
    check(blocks, plain)


class AddBias(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Twice(tops.BasicOperation):
    """Has a constant of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def op_forward_compute(self, input_: Tensor, **unused: Any) -> tuple[Tensor, tuple[()]]:
        return input_ * self.factor, ()

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, saved: Any, **unused: Any) -> None:
        ctx.factor = self.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return grad_output * ctx.factor, ()


def test_python_ops_keep_to_their_own_modules() -> None:
    blocks = [tops.Sequential(tops.Linear(8, 8), Twice(float(i))) for i in range(4)]
    plain = copy.deepcopy(blocks)
    compiled(blocks)
    check(blocks, plain)


class Single(tops.BasicOperation):
    """An op that needs a graph break."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return 2 * grad_output, ()


def test_what_dynamo_leaves_to_python_runs_its_own_modules() -> None:
    """As in plain torch, fullgraph=True finds what a compilation with a break has left."""
    blocks = [tops.Sequential(tops.Linear(8, 8), Single()) for _ in range(3)]
    plain = copy.deepcopy(blocks)
    for fullgraph in (False, True):
        check(
            [torch.compile(block, backend="aot_eager", fullgraph=fullgraph) for block in blocks],
            plain,
        )


def test_weights_that_accumulate_keep_to_their_own_modules() -> None:
    blocks = [
        tops.Sequential(tops.Linear(8, 8, accumulate_into_main_grad=True), tops.GELU())
        for _ in range(4)
    ]
    x = torch.randn(4, 8)
    for block in blocks:
        block.compile(backend="aot_eager")
    for _ in range(2):
        for block in blocks:
            block[0].weight.main_grad = torch.zeros_like(block[0].weight)
            plain = nn.Linear(8, 8)
            plain.load_state_dict(block[0].state_dict())
            block(x).sum().backward()
            nn.functional.gelu(plain(x), approximate="tanh").sum().backward()
            torch.testing.assert_close(block[0].weight.main_grad, plain.weight.grad)


def test_an_annealed_dropout_keeps_no_states() -> None:
    from transformer_ops.base import guard_groups

    module = tops.Sequential(tops.Linear(8, 8), tops.Dropout(0.5))
    module(torch.randn(2, 8))
    before = len(guard_groups._records)
    for step in range(50):
        module[1].p = step / 100
        assert module._traced_state
    assert len(guard_groups._records) <= before + 2  # of the module and of its group
    del module
    gc.collect()
    assert len(guard_groups._records) <= before
