"""What two gloo processes run for `test_wrapped_training.py`: training under recipes with every
kind of activation checkpointing, every place of the region and every wrapper of torch,
uninterrupted and resumed, compared with manual data parallelism."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import WAYS, Run, plain, within
from pairs import Row, pairwise
from ranks import group_of_ranks
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import make_scales, reset_scales, update_scales

DELAYED = recipes.DelayedScaling(amax_history_len=2)
RECIPES: dict[str, recipes.Recipe] = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "delayed": DELAYED,
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
STEPS, RESUMED, RATE = 4, 2, 2.0**-12
FULL = StateDictOptions(full_state_dict=True)


class Model(nn.Module):
    """Two blocks and a head. `way` calls the blocks; the optional `region()` surrounds each block
    and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(
                tops.Sequential(tops.RMSNorm(32), tops.Linear(32, 64), tops.SwiGLU())
                for _ in range(2)
            )
        )
        self.head = tops.Linear(32, 32)
        self.way: Run = plain
        self.region: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = within(self.region, self.head)(self.way(self.blocks, x, self.region))
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
        model,
        auto_wrap_policy=ModuleWrapPolicy({tops.Sequential}),
        use_orig_params=True,
        device_id=cpu,
        mixed_precision=mixed,
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
    model: nn.Module,
    recipe: recipes.Recipe | None,
    steps: range,
    rank: int,
    *,
    microbatches: int = 1,
) -> list[Tensor]:
    """The outputs on this rank. Without a recipe, regions are inside the model; without a wrapper,
    gradients are averaged manually."""
    outputs = []
    for step in steps:
        model.zero_grad()
        x, grad = batch(step, rank)
        x.requires_grad_()
        torch.manual_seed(step)  # for what rounds at random
        with nullcontext() if recipe is None else region(recipe):
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
    """Adds the row of the table to errors."""
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


# ---- the table

KINDS: dict[str, Run] = {
    "none": plain,
    "compiled": plain,
    **{k: WAYS[k] for k in ("reentrant", "non-reentrant", "selective", "sequential")},
}
# The errors of rows that are refused.
REFUSED: list[tuple[Row, str]] = [
    (
        {"recipe": "delayed", "kind": "reentrant", "region": "inside"},
        "a region of DelayedScaling must not be entered",
    ),
    (
        {"recipe": "delayed", "kind": "compiled", "region": "inside"},
        "a region of DelayedScaling must be entered outside of compiled code",
    ),
]


def refusal(row: Row) -> str | None:
    for some, message in REFUSED:
        if some.items() <= row.items():
            return message
    return None


def model_of(row: Row) -> Model:
    model = Model()
    model.way = KINDS[row["kind"]]
    if row["region"] == "inside":
        model.region = functools.partial(region, RECIPES[row["recipe"]])
    if row["kind"] == "compiled":
        # Wrappers call the code around the compiled code.
        for part in (*model.blocks, model.head):
            run = within(model.region, part.forward)
            part.forward = torch.compile(run, backend="aot_eager", fullgraph=True)
        model.region = None
    return model


def train_row(model: nn.Module, row: Row, steps: range, rank: int) -> list[Tensor]:
    is_inside = row["region"] == "inside"
    return train(model, None if is_inside else RECIPES[row["recipe"]], steps, rank)


@functools.cache
def wanted(recipe: str, place: str, rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of the plain run, and its final state."""
    row = {"recipe": recipe, "kind": "none", "region": place}
    model = model_of(row)
    outputs = train_row(model, row, range(STEPS), rank)
    return outputs, state_of(model)


def check_row(row: Row, rank: int) -> None:
    torch._dynamo.reset()
    recipe, by = RECIPES[row["recipe"]], row["wrapper"]
    want, final = wanted(row["recipe"], row["region"], rank)
    whole = wrapped(by, model_of(row))
    resume = RESUMES[row["run"]]
    if resume is None:
        found = train_row(whole, row, range(STEPS), rank)
    else:
        found = train_row(whole, row, range(RESUMED), rank)
        if isinstance(recipe, recipes.DelayedScaling):
            with pytest.warns(UserWarning, match="lacks the magnitudes that other ranks have met"):
                whole.state_dict()
            update_scales(recipe, dist.group.WORLD)
        whole = resume(by, model_of(row), recipe, whole, rank)
        found += train_row(whole, row, range(RESUMED, STEPS), rank)
    assert_same(found, want)
    assert_same(state_of(whole), final)


def check_refusal(row: Row, rank: int) -> None:
    torch._dynamo.reset()
    whole = wrapped(row["wrapper"], model_of(row))
    with pytest.raises(Exception, match=refusal(row)):
        train_row(whole, row, range(1), rank)
    if isinstance(RECIPES[row["recipe"]], recipes.DelayedScaling):
        reset_scales(whole)


def wrapped_with_scales(by: str, fresh: Model, recipe: Any) -> nn.Module:
    if isinstance(recipe, recipes.DelayedScaling):
        make_scales(fresh, recipe)
    return wrapped(by, fresh)


def shared_full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of rank 0, because ranks of a sharded model may lack parts."""
    shared = [state_of(model)]
    dist.broadcast_object_list(shared)
    return dict(shared[0])


def resume_sharded(by: str, fresh: Model, recipe: Any, old: nn.Module, rank: int) -> nn.Module:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(old), checkpoint_id=folder[0])
    model = wrapped_with_scales(by, fresh, recipe)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(model, state)
    return model


def resume_before(by: str, fresh: Model, recipe: Any, old: nn.Module, rank: int) -> nn.Module:
    """The wrapper gets a model that already has scales."""
    fresh.load_state_dict(shared_full_state(old))
    return wrapped(by, fresh)


def resume_from_one_rank(
    by: str, fresh: Model, recipe: Any, old: nn.Module, rank: int
) -> nn.Module:
    full = shared_full_state(old)
    model = wrapped_with_scales(by, fresh, recipe)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    return model


# How a run continues in a new model; uninterrupted runs do not.
RESUMES: dict[str, Run | None] = {
    "straight": None,
    "sharded": resume_sharded,
    "before the wrapper": resume_before,
    "from one rank": resume_from_one_rank,
}
AXES = {
    "recipe": list(RECIPES),
    "kind": list(KINDS),
    "region": ["outside", "inside"],
    "wrapper": list(WRAPPERS),
    "run": list(RESUMES),
}
TABLE = pairwise(AXES, lambda row: refusal(row) is None)
# Each refused combination has a row in every wrapper.
REFUSED_ROWS = [
    {"run": "straight", "wrapper": by, **some} for some, _ in REFUSED for by in WRAPPERS
]


def check_microbatches(by: str, rank: int) -> None:
    """Wrappers do not change the magnitudes that one microbatch of a region passes to the next."""
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
    # On every rank it takes part in a run that continues with it.
    again = copy.deepcopy(op)
    with region(DELAYED):
        pass
    assert again.fp8_scale[0] == op.fp8_scale[0] == 448.0 / 4.0
    del ema


def check_modules_that_run_on_one_rank(rank: int) -> None:
    """Every rank has both modules. The magnitudes of one of them are reduced, so all ranks know
    them."""
    modules = nn.ModuleList([tops.Linear(8, 8), tops.Linear(8, 8, bias=False)])
    make_scales(modules, DELAYED)
    for _ in range(2):
        with region(DELAYED):
            modules[rank](torch.full((2, 8), [1.0, 4.0][rank])).sum().backward()
    assert [float(m.fp8_scale[0]) for m in modules] == [448.0, 112.0]


def check_two_groups(rank: int) -> None:
    """Scales that another group has changed are detected."""
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
    with group_of_ranks(rank, 2, folder):
        check_a_copy_on_one_rank(rank)
        check_modules_that_run_on_one_rank(rank)
        check_two_groups(rank)
        for message, prepare in DISAGREEMENTS:
            check_disagreement(message, prepare, rank)
        check_without_a_group(rank)
        for by in WRAPPERS:
            check_microbatches(by, rank)
        for check, rows in ((check_row, TABLE), (check_refusal, REFUSED_ROWS)):
            for row in rows:
                with annotated(str(row)):
                    check(row, rank)
