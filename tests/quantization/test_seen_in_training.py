"""What training runs of other projects showed, each by the smallest program that shows it. The
programs use nothing that a fix brought, so that versions before it fail by what they compute or
say. The tables are in test_where_training_runs.py and test_wrapped_training.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import group_of_ranks, spawn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes

DELAYED = recipes.DelayedScaling(amax_history_len=2)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def block() -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(
        tops.LayerNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32)
    )


def rows() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def call(module: nn.Module) -> Tensor:
    with tops.autocast(recipe=DELAYED):
        y: Tensor = module(3 * rows())
    return y


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_has_the_scales(tmp_path: Path) -> None:
    old = block()
    for _ in range(2):
        call(old).sum().backward()
    dcp.save(get_model_state_dict(old), checkpoint_id=tmp_path)
    with tops.autocast(recipe=DELAYED):
        new = block()
    state = get_model_state_dict(new)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(new, state)
    assert "1.fp8_scale" in state and torch.equal(call(new), call(old))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("contexts", [False, True], ids=["plain", "contexts"])
def test_one_line_checkpoints_a_block_in_both_modes(contexts: bool, compiled: bool) -> None:
    module, x = block(), rows()
    options: dict[str, Any] = (
        {"context_fn": tops.quantization.checkpoint_contexts} if contexts else {}
    )

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False, **options)

    run = torch.compile(checkpointed, backend="aot_eager") if compiled else checkpointed
    with tops.autocast(recipe=recipes.MXFP8BlockScaling()):
        outputs = run(x), module(x)
    found, want = (torch.autograd.grad(y.sum(), [x, *module.parameters()]) for y in outputs)
    assert all(map(torch.equal, found, want))


def copied_on_one_rank(rank: int, folder: str) -> None:
    with group_of_ranks(rank, 2, folder):
        op, average = tops.Linear(8, 8), None
        for step in range(3):
            with tops.autocast(recipe=DELAYED, amax_reduction_group=dist.group.WORLD):
                op(torch.full((2, 8), 1.0 + step + rank)).sum().backward()
            if rank == 0 and step == 0:
                average = copy.deepcopy(op)
        assert op.fp8_scale[0] == 448.0 / 3.0
        del average


def test_a_copy_that_one_rank_has_takes_no_part(tmp_path: Path) -> None:
    spawn(copied_on_one_rank, str(tmp_path), ranks=2)


def test_later_uses_of_a_weight_add_to_a_main_grad_that_is_overwritten() -> None:
    first, second = (tops.BasicLinear(16, 16, accumulate_into_main_grad=True) for _ in range(2))
    second.weight = weight = first.weight
    weight.main_grad = torch.full((16, 16), 5.0)
    weight.overwrite_main_grad = True
    x = torch.randn(4, 16)
    tops.Sequential(first, tops.GELU(), second)(x).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    gelu = nn.functional.gelu(x @ plain.t(), approximate="tanh")
    (want,) = torch.autograd.grad((gelu @ plain.t()).sum(), plain)
    torch.testing.assert_close(weight.main_grad, want)


class Masks(TorchDispatchMode):
    """The output masks of products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.endswith("::linear_backward"):
            self.found.append(list(args[3]))
        return func(*args, **(kwargs or {}))


def test_each_half_of_a_backward_has_its_own_products() -> None:
    op, x = tops.BasicLinear(16, 8), torch.randn(4, 16, requires_grad=True)
    y = op(x).sum()
    for wanted, mask in ((x, [True, False]), (op.weight, [False, True])):
        with Masks() as masks:
            torch.autograd.grad(y, wanted, retain_graph=True)
        assert masks.found == [mask]


def test_docs_say_that_a_write_through_data_is_not_noticed() -> None:
    op, x = tops.Linear(32, 32), rows()
    with tops.autocast(recipe=recipes.MXFP8BlockScaling()), tops.frozen_weights():
        before = op(x)
        op.weight.data.mul_(2)
        is_noticed = not torch.equal(op(x), before)
    says = "A write through `weight.data` or numpy is not noticed"
    assert is_noticed or says in (DOCS / "quantization.md").read_text()


class Halves(tops.BasicOperation):
    """With the single method, which no graph takes."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ / 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output / 2, ()


def test_an_op_that_leaves_a_graph_is_named() -> None:
    run = torch.compile(tops.Sequential(Halves()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"reason: \[Halves\] .*op_forward_compute"):
        run(torch.ones(2, 4))


def test_an_error_of_a_constructor_names_the_public_class() -> None:
    with pytest.raises(TypeError, match=r"RMSNorm.*'bias'.*normalized_shape"):
        tops.RMSNorm(8, bias=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "says", ["`RMSNorm(n)` has `eps=1e-5`", "At exactly the limit of a clamped unit"]
)
def test_docs_have_the_differences_of_nn(says: str) -> None:
    assert says in (DOCS / "differences.md").read_text()


def test_the_eps_of_nn() -> None:
    x = 1e-3 * rows()
    torch.testing.assert_close(tops.RMSNorm(32, eps=None)(x), nn.RMSNorm(32)(x))
