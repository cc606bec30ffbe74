"""What a step of training holds at most, and that nobody sees memory that is used again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import widened_bytes
from test_memory import HEADER, run_script

import transformer_ops as tops
from transformer_ops import memory

pytestmark = pytest.mark.takes(seconds=25)

ROWS, HIDDEN, WIDE = 512, 512, 2048
BLOCKS = {
    "GELU": lambda f: [tops.Linear(HIDDEN, f), tops.GELU(), tops.Linear(f, HIDDEN)],
    "SwiGLU": lambda f: [
        tops.Linear(HIDDEN, 2 * f, bias=False),
        tops.SwiGLU(),
        tops.Linear(f, HIDDEN, bias=False),
    ],
    "unfused": lambda f: [tops.SiLU(), tops.BasicLinear(HIDDEN, f), tops.Dropout(0.1), tops.SiLU()],
}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The scripts import this module, and it imports helpers.
FOLDERS = [str(Path(__file__).parents[n]) for n in (0, 1)]
every_block = pytest.mark.parametrize("name", BLOCKS)


def block(name: str, f: int = WIDE) -> tops.Sequential:
    return tops.Sequential(tops.LayerNorm(HIDDEN), *BLOCKS[name](f))


def peaks(script: str) -> list[int]:
    """What the script prints: bytes."""
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    return [int(line) for line in run_script(script, PYTHONPATH=path).split()]


@pytest.mark.parametrize(("name", "kept"), [("GELU", 1), ("SwiGLU", 2)])
def test_a_step_holds_no_more_than_it_must(name: str, kept: int) -> None:
    """The output, what is kept, both weights' gradients, and one tensor of the hidden size.

    The gradient of what is kept takes its memory. Vectors are too small for the pool.
    """
    script = (
        HEADER
        + f"""
from test_peak_memory import *
module = block("{name}")
x = torch.randn(ROWS, HIDDEN, requires_grad=True)
y = module(x)
print(memory.stats().peak_in_use_bytes)
y.backward(torch.ones_like(y))
print(memory.stats().peak_in_use_bytes)
"""
    )
    forward, whole = peaks(script)
    hidden, wide, weight = ROWS * HIDDEN, ROWS * WIDE, HIDDEN * WIDE
    assert whole == 4 * (hidden + kept * wide + (kept + 1) * weight + hidden)
    # The output of the activation, and the norm's before.
    assert forward <= 4 * (hidden + (kept + 1) * wide + hidden)


def test_forward_does_not_hold_what_backward_recomputes() -> None:
    """The norm's output, and the sum in whose memory the activation runs."""
    script = (
        HEADER
        + """
from test_peak_memory import *
module = block("GELU")
module.recompute = "products"
module(torch.randn(ROWS, HIDDEN, requires_grad=True))
print(memory.stats().peak_in_use_bytes)
"""
    )
    (found,) = peaks(script)
    assert found == 4 * ROWS * (HIDDEN + WIDE)


@pytest.mark.parametrize("saved", ["exact", "fp8"])
def test_many_rows_a_stack_holds_most_at_the_end_of_forward(saved: str) -> None:
    """Inputs of all blocks but the first, and what is kept of the units' inputs.

    Beside them a unit's output and the output of the stack, while the last product runs; in 8
    bits, before there is one, the last unit's input itself.
    """
    forward, whole = peaks_of_a_stack(saved, rows=4096)
    hidden, wide = 2 * 4096 * STACK_HIDDEN, 2 * 4096 * STACK_WIDE
    codes = wide + 4 * 4096 * 2 * STACK_WIDE // 128  # of a unit's input, which is 2 * wide
    if saved == "exact":
        want = (STACK - 1) * hidden + STACK * 2 * wide + wide + hidden
        want += widened_bytes(4096, STACK_WIDE, STACK_HIDDEN)
    else:
        want = (STACK - 1) * hidden + STACK * codes + 2 * wide + wide
    assert forward == whole == want


def test_few_rows_a_stack_holds_most_when_all_gradients_are_there() -> None:
    """The peak is while the product for the first weight's gradient runs. In memory are, besides
    the gradients of parameters: the output and its gradient, a gradient of a unit's input, and a
    recomputed norm output."""
    _, whole = peaks_of_a_stack("fp8", rows=256)
    hidden, wide = 2 * 256 * STACK_HIDDEN, 2 * 256 * STACK_WIDE
    weights = STACK * 2 * 3 * STACK_HIDDEN * STACK_WIDE
    product = widened_bytes(2 * STACK_WIDE, 256, STACK_HIDDEN)
    assert whole == weights + 3 * hidden + 2 * wide + product


STACK, STACK_HIDDEN, STACK_WIDE = 4, 512, 1024


def peaks_of_a_stack(saved: str, rows: int) -> list[int]:
    """Bytes of Llama blocks in bfloat16 in forward, and in a whole step."""
    script = (
        HEADER
        + f"""
import sys
from test_peak_memory import *
sys.path.insert(0, {str(BENCHMARKS)!r})
from blocks import LLAMA_BLOCK
blocks = [LLAMA_BLOCK.ours(STACK_HIDDEN, STACK_WIDE).bfloat16() for _ in range(STACK)]
for one in blocks:
    one.saved = "{saved}"
x = torch.randn({rows}, STACK_HIDDEN, dtype=torch.bfloat16, requires_grad=True)
y = torch.nn.Sequential(*blocks)(x)
print(memory.stats().peak_in_use_bytes)
y.backward(torch.ones_like(y))
print(memory.stats().peak_in_use_bytes)
"""
    )
    return peaks(script)


def test_inference_writes_over_what_nobody_reads_again() -> None:
    script = (
        HEADER
        + """
module = tops.Sequential(*(op for _ in range(4) for op in (tops.GELU(), tops.RMSNorm(2048))))
x = torch.randn(1024, 2048)
with torch.no_grad():
    module(x)
print(memory.stats().peak_in_use_bytes)
"""
    )
    assert int(run_script(script)) == 4 * 1024 * 2048


@every_block
def test_a_retained_graph_can_be_walked_again(name: str) -> None:
    module = block(name)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    y = module(x)
    tensors = [x, *module.parameters()]
    want = torch.autograd.grad(y.sum(), tensors, retain_graph=True)
    for retain in (True, False):
        got = torch.autograd.grad(y.sum(), tensors, retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), tensors)


@every_block
def test_saved_tensors_in_other_hands_keep_their_values(name: str) -> None:
    module = block(name)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    y.backward(torch.ones_like(y))
    assert packed and all(torch.equal(tensor, copy) for tensor, copy in packed)


@every_block
def test_gradients_in_other_hands_keep_their_values(name: str) -> None:
    first, second = tops.Sequential(tops.SiLU()), block(name)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    middle = first(x)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    middle.register_hook(lambda grad: seen.append((grad, grad.clone())))
    y = second(middle)
    grad = torch.randn_like(y)
    copy = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, copy)
    assert torch.equal(*seen[0])


@every_block
def test_slices_of_columns_give_the_same(name: str) -> None:
    """More columns than a slice holds; the last slice is shorter."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        module = block(name, 2256).to(dtype)
        x = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
        tensors = [x, *module.parameters()]
        results = []
        for recompute in ("cheap", "none"):
            module.recompute = recompute
            torch.manual_seed(1)
            y = module(x)
            results.append(torch.autograd.grad(y, tensors, torch.ones_like(y)))
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        for a, b in zip(*results, strict=True):
            assert (a - b).double().norm() <= tolerance * b.double().norm()


def test_nothing_is_held_afterwards() -> None:
    module = block("GELU")
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    before = memory.stats().in_use_bytes
    torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    assert memory.stats().in_use_bytes == before
