"""`fuse` in two processes: DDP, FSDP1, FSDP2, tensor parallelism, adapters and experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from fuse_models import fused_rules, llama
from ranks import Jobs
from test_fuse_experts import sharded_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import transformer_ops as tops
from transformer_ops.models.deferred import DeferredLogits

pytestmark = pytest.mark.takes(seconds=45)


def _whole(tensor: Any) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if full is None else full()
    return found


class Around(nn.Module):
    """A wrapper that returns what the model returns, as adapters have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        return self.model(**given)


def _by_fsdp1(model: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
    )


def _around(model: Any, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(Around(Around(model)), **options)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP that finds unused": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
    "DDP of a static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "FSDP1": _by_fsdp1,
    "FSDP1 of a wrapper": lambda model: FullyShardedDataParallel(
        Around(model), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDP2": lambda model: _shard(model),
    "FSDP2 and fuse": lambda model: model,
    "FSDP2 of a wrapper": _around,
    "FSDP2 that frees": lambda model: _around(model, reshard_after_forward=True),
}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the end of a name: wrappers add a beginning."""
    whole = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with whole:
        return {
            name[name.rfind("model.layers") :] if "layers" in name else name.split(".")[-2]: (
                _whole(p.grad).clone()
            )
            for name, p in model.named_parameters()
        }


def training(rank: int) -> None:
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    plain = llama()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    own = tokens[2 * rank : 2 * rank + 2]
    for kind, wrap in WRAPPERS.items():
        model: Any = llama()
        if kind == "FSDP2 and fuse":
            _shard(model)
        report = tops.fuse(model)
        run = wrap(model)
        for _ in range(2):
            run.zero_grad()
            out = run(input_ids=own, labels=own)
            out.loss.backward()
        is_deferred = isinstance(out.logits, DeferredLogits)
        assert is_deferred == ("DDP" in kind and "FS" not in kind), kind
        assert not is_deferred or vars(out.logits)["_promise"].is_open, kind
        # Between the calls, FSDP1 leaves no parameters that a report could look at.
        assert "FSDP1" in kind or fused_rules(report) == {"norm": 1, "layer": 2}, kind
        # Where no product of float32 ran as an op, its weight is a DTensor between the calls,
        # as that of the head is.
        skipped = {row.rule for row in report.skipped}
        assert "FSDP1" in kind or skipped <= {"product", "head and loss"}, kind
        found = _gradients(run)
        for name, want in _gradients(plain).items():
            difference = found[name] - want
            assert difference.norm() <= 1e-5 * want.norm() + 1e-7, (kind, name)
        run.zero_grad()
        run(input_ids=own, labels=own).logits.square().mean().backward()
        dist.barrier()


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _same_steps(other: Any, model: Any, given: dict[str, Tensor]) -> None:
    for one in (other, model):
        one.zero_grad()
        one(**given).loss.backward()
    for want, found in zip(other.parameters(), model.parameters(), strict=True):
        difference = _whole(found.grad) - _whole(want.grad)
        assert difference.norm() <= 1e-5 * _whole(want.grad).norm() + 1e-7


def _shard(model: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _plan(model: Any) -> None:
    """Tensor parallelism of its feed-forwards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, {**rows, "down_proj": RowwiseParallel()})


def reports_and_unfuse(rank: int) -> None:
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "labels": tokens}
    whole = llama()
    wanted, _ = tops.fuse(whole).saved_bytes(**given)
    for kind, split in (("FSDP2", _shard), ("tensor parallel", _plan)):
        other, model = llama(), llama()
        report = tops.fuse(model)
        for one in (other, model):
            split(one)
            one(**given).loss.backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for root_is_gathered in (False, True):
            if root_is_gathered and kind == "FSDP2":
                model.unshard()
            before = [(id(p), p.grad) for p in model.parameters()]

            def fail(output: Any) -> Tensor:
                raise ArithmeticError("the loss")

            with pytest.raises(ArithmeticError, match="the loss"):
                report.step(**given, loss=fail)
            found = report.step(**given, optimizer=optimizer)
            local = sum(_local(p).nbytes for p in other.parameters())
            buffers = sum(b.nbytes for b in model.buffers())
            assert found.after.parameters == local + buffers, kind
            if kind == "FSDP2":
                assert report.saved_bytes(**given)[0] == wanted, report.layers(**given)
            assert report.layers(**given).after == report.saved_bytes(**given)[1] > 0
            with pytest.raises(ValueError, match="input_ids"):
                report.saved_bytes(input_ids=None)
            after = [(id(p), p.grad) for p in model.parameters()]
            assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))
        if kind == "FSDP2":
            model.reshard()
        _same_steps(other, model, given)
        tops.unfuse(model)
        if kind == "FSDP2":
            sharded = [isinstance(inner, FSDPModule) for inner in other.modules()]
            assert [isinstance(inner, FSDPModule) for inner in model.modules()] == sharded
        assert not any(hasattr(inner, "_tops_base") for inner in model.modules())
        _same_steps(other, model, given)
        dist.barrier()


def _with_adapters() -> Any:
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(), config)


def adapters(rank: int) -> None:
    """As TRL wraps them: each layer and the PeftModel in `fully_shard`."""
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    plain = _with_adapters()
    loss = plain(input_ids=tokens, labels=tokens).loss
    loss.backward()
    want = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    own = tokens[2 * rank : 2 * rank + 2]
    model = _with_adapters()
    report = tops.fuse(model)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=own, labels=own)
        out.loss.backward()
    dist.all_reduce(mean := out.loss.detach() / 2)
    torch.testing.assert_close(mean, loss.detach())
    # The adapters are in both halves of a layer, and not in the norms.
    assert fused_rules(report)["norm"] >= 1
    found = {name: _whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == want.keys() and want
    for name, gradient in want.items():
        difference = found[name] - gradient
        assert difference.norm() <= 1e-5 * gradient.norm() + 1e-7, name


JOBS = [training, reports_and_unfuse, adapters, sharded_experts]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(JOBS, str(tmp_path_factory.mktemp("jobs")), ranks=2)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_in_two_processes(job: Callable[[int], None], jobs: Jobs) -> None:
    jobs.check(job)
