"""`run_call`: calls of ops that plans alone need, as text. Wrong ones are clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_plans import on_cuda, run
from plan_calls import RUN_CALL, plan_op
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_ops as tops
from transformer_ops.recipe import NVFP4BlockScaling

OPS = torch.ops.transformer_ops
ROUNDED = 'silu.rounded(%, "mx e4m3", "")'


def x() -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def test_a_call_is_the_op_of_its_text() -> None:
    found = RUN_CALL(ROUNDED, [x()])
    want = OPS.quantize_dequantize(OPS.silu(x()), "mx e4m3", "float32")
    assert torch.equal(found[0], want) and found[1].numel() == 0
    (again,) = plan_op("quantize_dequantize_groups.saved")(x(), [x()], None, "mx e4m3", "float32")
    assert torch.equal(again, OPS.quantize_dequantize(x(), "mx e4m3", "float32"))


def test_compilers_know_which_calls_are_random() -> None:
    """A plan calls the overload that has torch's tag for random numbers."""
    module = tops.Sequential(tops.Linear(32, 32)).bfloat16()
    y = x().bfloat16()
    plan = on_cuda(module, y, NVFP4BlockScaling()).plans()[-1]
    called: dict[str, set[Any]] = {}

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is RUN_CALL:
                called.setdefault(args[0].partition("(")[0], set()).add(func)
            return func(*args, **kwargs or {})

    with Calls():
        run(plan, module, y, {})
    is_random = {name: "_stochastic" in name for name in called}
    assert True in is_random.values() and False in is_random.values()
    for name, found in called.items():
        assert found == {RUN_CALL.random if is_random[name] else RUN_CALL.default}
    tag = torch.Tag.nondeterministic_seeded
    assert tag in RUN_CALL.random.tags and tag not in RUN_CALL.default.tags


def test_a_profiler_shows_the_op() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        RUN_CALL(ROUNDED, [x()])
    names = [event.name for event in profile.events()]
    assert {"transformer_ops::run_call", "transformer_ops::silu.rounded"} <= set(names)


@pytest.mark.parametrize(
    ("text", "tensors", "message"),
    [
        ("silu.rounded", 1, "call must read 'op(arguments)'"),
        ('elu.rounded(%, "mx e4m3", "")', 1, "of an op that plans call, got 'elu.rounded"),
        ('silu.doubled(%, "mx e4m3", "")', 1, "of an op that plans call"),
        ('silu.rounded(%, "mx e4m3")', 1, "call must fit the schema 'silu.rounded"),
        ('silu.rounded("mx e4m3", %, "")', 1, "call must fit the schema"),
        ('silu.rounded([%], "mx e4m3", "")', 1, "call must fit the schema"),
        ("silu.rounded(%, 3, true)", 1, "call must fit the schema"),
        ("silu.rounded(%, mx, true)", 1, "call must have arguments as a plan has them"),
        (ROUNDED, 2, "call must have 1 tensors, got 2"),
    ],
)
def test_a_wrong_call_says_so(text: str, tensors: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^\[run_call\] ") as caught:
        RUN_CALL(text, [x()] * tensors)
    assert message in str(caught.value)


def test_no_gradient_passes() -> None:
    """A graph of forward and backward runs; whoever asks for a gradient of its results is told."""
    result = RUN_CALL(ROUNDED, [x().requires_grad_()])[0]
    with pytest.raises(
        NotImplementedError, match=r"\[run_call\] tensors of silu.rounded must not require"
    ):
        result.sum().backward()
