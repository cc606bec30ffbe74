"""What two gloo processes run for `test_wrapped_training.py`: training under recipes in every
wrapper of torch, straight and resumed, against data parallelism by hand."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import make_scales, reset_scales, update_scales

DELAYED = recipes.DelayedScaling(amax_history_len=2)
RECIPES: dict[str, recipes.Recipe] = {"mxfp8": recipes.MXFP8BlockScaling(), "delayed": DELAYED}
STEPS, RESUMED, RATE = 4, 2, 2.0**-12
FULL = StateDictOptions(full_state_dict=True)


class Model(nn.Module):
    """Two blocks and a head; blocks are checkpointed if `checkpoints` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            tops.Sequential(tops.RMSNorm(32), tops.Linear(32, 64), tops.SwiGLU()) for _ in range(2)
        )
        self.head = tops.Linear(32, 32)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        y: Tensor = self.head(x)
        return y


def by_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def by_replicate(model: Model) -> nn.Module:
    return replicate(model)


def by_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_fsdp1(model: Model) -> nn.Module:
    # The dtype that accelerate gives to buffers; it must not reach scales.
    mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, use_orig_params=True, device_id=cpu, mixed_precision=mixed
    )


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": by_ddp,
    "replicate": by_replicate,
    "fsdp2": by_fsdp2,
    "fsdp1": by_fsdp1,
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = [1.0, 8.0, 0.5, 3.0][step] * (1 + rank)
    x, grad = (size * torch.randn(16, 32, generator=generator) for _ in range(2))
    return x, grad


def region(recipe: recipes.Recipe) -> Any:
    return tops.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD)


def train(
    model: nn.Module, recipe: recipes.Recipe, steps: range, rank: int, *, microbatches: int = 1
) -> list[Tensor]:
    """The outputs on this rank. Without a wrapper gradients are averaged by hand."""
    outputs = []
    for step in steps:
        model.zero_grad()
        x, grad = batch(step, rank)
        with region(recipe):
            for part in range(microbatches):
                y = model(x / (1 + part))
                if microbatches == 1:
                    break
                y.backward(grad)
        if microbatches == 1:
            y.backward(grad)
        outputs.append(y.detach().clone())
        if isinstance(model, Model) and not hasattr(model, "wrapped"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
    return outputs


def wrapped(by: str, model: Model) -> nn.Module:
    model.wrapped = True  # type: ignore[assignment]
    return WRAPPERS[by](model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lacks the magnitudes that other ranks")
        return {k: v.clone() for k, v in get_model_state_dict(model, options=FULL).items()}


@contextmanager
def annotated(row: str) -> Iterator[None]:
    """Errors name the row of the table."""
    try:
        yield
    except Exception as error:
        raise AssertionError(row) from error


def assert_same(found: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert found.keys() == want.keys(), found.keys() ^ want.keys()
        found, want = list(found.values()), [want[key] for key in found]
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def check_wrapper(by: str, name: str, rank: int, *, checkpoints: bool) -> None:
    recipe = RECIPES[name]
    plain, model = Model(), Model()
    model.checkpoints = checkpoints
    want = train(plain, recipe, range(STEPS), rank)
    whole = wrapped(by, model)
    found = train(whole, recipe, range(RESUMED), rank)
    if isinstance(recipe, recipes.DelayedScaling):
        with pytest.warns(UserWarning, match="lacks the magnitudes that other ranks have met"):
            whole.state_dict()
        update_scales(recipe, dist.group.WORLD)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(whole), checkpoint_id=folder[0])
    full = state_of(whole)
    found += train(whole, recipe, range(RESUMED, STEPS), rank)
    final = state_of(whole)
    with annotated(f"{by} {name} straight, checkpoints={checkpoints}"):
        assert_same(found, want)
    shared = [full]  # which ranks of a sharded model may lack
    dist.broadcast_object_list(shared)
    for resume in (resume_sharded, resume_before, resume_from_one_rank):
        fresh = Model()
        fresh.checkpoints = checkpoints
        again = resume(by, fresh, recipe, folder[0], dict(shared[0]), rank)
        outputs = train(again, recipe, range(RESUMED, STEPS), rank)
        with annotated(f"{by} {name} {resume.__name__}, checkpoints={checkpoints}"):
            assert_same(outputs, want[RESUMED:])
            assert_same(state_of(again), final)


def wrapped_with_scales(by: str, fresh: Model, recipe: Any) -> nn.Module:
    if isinstance(recipe, recipes.DelayedScaling):
        make_scales(fresh, recipe)
    return wrapped(by, fresh)


def resume_sharded(
    by: str, fresh: Model, recipe: Any, folder: Any, full: Any, rank: int
) -> nn.Module:
    model = wrapped_with_scales(by, fresh, recipe)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return model


def resume_before(
    by: str, fresh: Model, recipe: Any, folder: Any, full: Any, rank: int
) -> nn.Module:
    """The wrapper gets a model that has scales."""
    fresh.load_state_dict(full)
    return wrapped(by, fresh)


def resume_from_one_rank(
    by: str, fresh: Model, recipe: Any, folder: Any, full: Any, rank: int
) -> nn.Module:
    model = wrapped_with_scales(by, fresh, recipe)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    return model


def check_microbatches(by: str, rank: int) -> None:
    """Wrappers do not change the magnitudes that one microbatch of a region leaves to the next."""
    states = []
    for is_resumed in (False, True):
        model = Model()
        if is_resumed:
            make_scales(model, DELAYED)
        whole = wrapped(by, model)
        train(whole, DELAYED, range(3), rank, microbatches=2)
        states.append(state_of(whole))
    assert_same(*states)


# ---- ranks that differ


def check_a_copy_on_one_rank(rank: int) -> None:
    op = tops.Linear(8, 8)
    ema = None
    for step in range(3):
        with region(DELAYED):
            op(torch.full((2, 8), 1.0 + step + rank)).sum().backward()
        if rank == 0 and step == 0:
            ema = copy.deepcopy(op)
    assert op.fp8_scale[0] == 448.0 / 3.0
    # On every rank it takes part: a run that goes on with it.
    again = copy.deepcopy(op)
    with region(DELAYED):
        pass
    assert again.fp8_scale[0] == op.fp8_scale[0] == 448.0 / 4.0
    del ema


def check_modules_that_run_on_one_rank(rank: int) -> None:
    """Every rank has both: what one of them met is reduced, and known to all."""
    modules = nn.ModuleList([tops.Linear(8, 8), tops.Linear(8, 8, bias=False)])
    make_scales(modules, DELAYED)
    for _ in range(2):
        with region(DELAYED):
            modules[rank](torch.full((2, 8), [1.0, 4.0][rank])).sum().backward()
    assert [float(m.fp8_scale[0]) for m in modules] == [448.0, 112.0]


def check_two_groups(rank: int) -> None:
    """Scales that another group has changed are noticed."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    op = tops.Linear(8, 8)
    for k, group in enumerate((dist.group.WORLD, alone, dist.group.WORLD)):
        with (
            nullcontext()
            if k < 2
            else pytest.raises(RuntimeError, match="must be the same on all"),
            tops.autocast(recipe=DELAYED, amax_reduction_group=group),
        ):
            op(torch.full((2, 8), 1.0 + rank)).sum().backward()
    reset_scales(op)


def check_disagreement(
    message: str, prepare: Callable[[int], tuple[Any, recipes.DelayedScaling]], rank: int
) -> None:
    model = Model()
    with region(DELAYED):
        model(batch(0, 0)[0]).sum().backward()
    kept, recipe = prepare(rank)
    states = [copy.deepcopy(m.state_dict()) for m in (model, kept)]
    with pytest.raises(RuntimeError, match=message):
        with region(recipe):
            pass
    for module, state in zip((model, kept), states, strict=True):
        assert_same(dict(module.state_dict()), dict(state))
    reset_scales(kept)
    reset_scales(model)


def one_runs(rank: int) -> tuple[Any, recipes.DelayedScaling]:
    op, other = tops.Linear(8, 8), tops.Linear(8, 24, bias=False)
    with region(DELAYED):
        op(torch.ones(2, 8)).sum().backward()
        if rank == 0:  # which makes its scales there alone
            other(torch.ones(2, 8)).sum().backward()
    return nn.ModuleList([op, other]), DELAYED


def other_history(rank: int) -> tuple[Any, recipes.DelayedScaling]:
    op = tops.Linear(8, 24)
    with region(DELAYED):
        op(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        state = {k: 2 * v if k == "fp8_scale" else v for k, v in op.state_dict().items()}
        op.load_state_dict(state)
    return op, DELAYED


def other_recipe(rank: int) -> tuple[Any, recipes.DelayedScaling]:
    op = tops.Linear(8, 24)
    return op, recipes.DelayedScaling(amax_history_len=2, margin=rank)


DISAGREEMENTS: list[tuple[str, Callable[[int], tuple[Any, recipes.DelayedScaling]]]] = [
    (r"got \d+ on rank 0 and \d+ on rank 1; on rank 0 alone Linear\(in_features=8, out", one_runs),
    (r"got others on rank 1 than on rank 0 for Linear\(in_features=8, out", other_history),
    (r"recipe must be the same on all ranks .*margin=1", other_recipe),
]


def check_without_a_group(rank: int) -> None:
    op = tops.Linear(8, 8)
    for reduces, warns in ((True, True), (False, False)):
        recipe = recipes.DelayedScaling(amax_history_len=2, reduce_amax=reduces)
        expected = pytest.warns(UserWarning, match="without an amax_reduction_group keeps scales")
        with expected if warns else nullcontext(), tops.autocast(recipe=recipe):
            op(torch.full((2, 8), 1.0 + rank)).sum().backward()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/wrapped",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        check_a_copy_on_one_rank(rank)
        check_modules_that_run_on_one_rank(rank)
        check_two_groups(rank)
        for message, prepare in DISAGREEMENTS:
            check_disagreement(message, prepare, rank)
        check_without_a_group(rank)
        for by in WRAPPERS:
            for name in RECIPES:
                for checkpoints in (False, True):
                    check_wrapper(by, name, rank, checkpoints=checkpoints)
            check_microbatches(by, rank)
    finally:
        dist.destroy_process_group()
