"""What saved="fp8" and saved="int8" save and cost: bytes, time, peak memory, error of gradients.

    python benchmarks/saved_formats.py [--quick] [--check]

A Llama block in bfloat16 against the same block with saved="exact": bytes that one call keeps, the
time of forward and backward (median over interleaved rounds), and the peak of a stack of six above
its parameters, each in a process of its own. Then the relative error of all gradients of the
example GPT. --check holds bytes and errors, which repeat exactly, to their limits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import blocks
import torch
from suite.measure import make_calls, saved_bytes
from suite.peak import training_peak
from suite.timing import Call, Clock, interleave, ratio
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.memory import StepBytes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.model import GPT, initialize

STACK = 6
CPU = torch.device("cpu")
# As in bench.py: malloc maps every tensor on pages of its own.
TUNABLES = "glibc.malloc.mmap_threshold=65536"


class Policy(NamedTuple):
    """How a block keeps what backward reads."""

    saved: str
    inputs: bool = False

    @property
    def name(self) -> str:
        """As in code."""
        return f'saved="{self.saved}"' + ", saved_inputs=True" * self.inputs


EXACT, SAVED = Policy("exact"), Policy("fp8")
POLICIES = [Policy(saved, inputs) for saved in ("fp8", "int8") for inputs in (False, True)]
BYTES = {False: 0.65, True: 0.55}  # by saved_inputs
ERRORS = {"fp8": 0.01, "int8": 0.003}


class Size(NamedTuple):
    """Tokens, hidden size, feed-forward size."""

    tokens: int
    hidden: int
    ffn: int


def make_block(policy: Policy, size: Size) -> nn.Module:
    """The Llama block with its residual, in bfloat16."""
    torch.manual_seed(0)
    module = blocks.LLAMA_BLOCK.ours(size.hidden, size.ffn).to(torch.bfloat16)
    assert isinstance(module, tops.Sequential)
    module.saved = policy.saved
    if policy.inputs:
        module.saved_inputs = True
    return module


def make_input(size: Size) -> Tensor:
    """[tokens, hidden], which wants a gradient."""
    return torch.randn(size.tokens, size.hidden, dtype=torch.bfloat16, requires_grad=True)


# ---- a block


def kept_bytes(policy: Policy, size: Size) -> int:
    """The bytes that one call saves for backward, without parameters."""
    module = make_block(policy, size)
    return saved_bytes(module, [make_input(size)], list(module.parameters()))


def step_ratios(size: Size, seconds: float) -> dict[Policy, float]:
    """Forward and backward, against saved="exact"."""
    x = make_input(size)
    calls: dict[str, Call] = {}
    for policy in (EXACT, *POLICIES):
        module = make_block(policy, size)
        calls[policy.name] = make_calls(module, [x], list(module.parameters()))[1]
    times = interleave(calls, seconds, Clock(CPU))
    return {policy: ratio(times[policy.name], times[EXACT.name]) for policy in POLICIES}


def stack_peak(policy: Policy, size: Size) -> int:
    """Bytes above parameters, input and output gradient in a few steps of SGD."""
    module = nn.Sequential(*(make_block(policy, size) for _ in range(STACK)))
    return training_peak(module, module, make_input(size))


def stack_peak_apart(policy: Policy, size: Size) -> int:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--peak", policy.saved, str(int(policy.inputs))]
    done = subprocess.run(
        [*command, *map(str, size)],
        env={**os.environ, "GLIBC_TUNABLES": TUNABLES},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


def held_in_step(policy: Policy, size: Size, in_backward: bool) -> StepBytes:
    """The bytes that a step of the stack holds, with AdamW after backward or in it."""
    module = nn.Sequential(*(make_block(policy, size) for _ in range(STACK)))
    optimizers = {p: torch.optim.AdamW([p]) for p in module.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers if in_backward else ():
        parameter.register_post_accumulate_grad_hook(step)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    found: StepBytes = tops.memory.step_bytes(
        module, make_input(size), optimizer=optimizers.values(), loss=loss
    )
    return found


def print_steps(size: Size) -> None:
    """A line for each way, in MiB."""
    titles = [name.replace("_", " ") for name in (*StepBytes._fields, "peak")]
    print(f"\na step of {STACK} blocks with AdamW holds, in MiB\n  {'':<26}", *titles, sep="  ")
    for policy in (EXACT, SAVED):
        for in_backward in (False, True):
            found = held_in_step(policy, size, in_backward).as_dict().values()
            name = policy.name + ", in backward" * in_backward
            cells = (f"{n / 2**20:>{len(t)}.1f}" for n, t in zip(found, titles, strict=True))
            print(f"  {name:<26}", *cells, sep="  ")


# ---- a model


def gradients(saved: str, dtype: torch.dtype) -> Tensor:
    """All gradients of the example GPT in one batch of text, as one vector."""
    model = GPT("tops", context=128, layers=4, width=128, dropout=0.0, saved=saved)
    initialize(model, seed=0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    inputs, targets = (text[i : i + 8 * 128].view(8, 128) for i in (0, 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model(inputs, targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(saved: str, dtype: torch.dtype) -> float:
    """|g - g_exact| / |g_exact|."""
    exact = gradients("exact", dtype)
    return float((gradients(saved, dtype) - exact).norm() / exact.norm())


def main() -> int:
    """Prints two tables."""
    options = parse()
    if options.peak:
        saved, inputs, *size = options.peak
        print(stack_peak(Policy(saved, inputs == "1"), Size(*map(int, size))))
        return 0
    torch.set_num_threads(options.threads)
    size = Size(256, 256, 512) if options.quick else Size(1024, 768, 2048)
    kept = {policy: kept_bytes(policy, size) for policy in (EXACT, *POLICIES)}
    times = step_ratios(size, 2.0 if options.quick else 20.0)
    peaks = {policy: stack_peak_apart(policy, size) for policy in (EXACT, *POLICIES)}
    print(f"Llama block, bfloat16, {size.tokens} x {size.hidden}, ffn {size.ffn}: against exact")
    print(f"  {'':<36}{'bytes a token':>16}{'bytes':>8}{'step':>8}{'peak of 6':>12}")
    print(f"  {EXACT.name:<36}{kept[EXACT] / size.tokens:>16,.0f}{1:>7.2f}x{1:>7.2f}x{1:>11.2f}x")
    failures = []
    for policy in POLICIES:
        share = kept[policy] / kept[EXACT]
        print(
            f"  {policy.name:<36}{kept[policy] / size.tokens:>16,.0f}{share:>7.2f}x"
            f"{times[policy]:>7.2f}x{peaks[policy] / peaks[EXACT]:>11.2f}x"
        )
        if share > BYTES[policy.inputs]:
            failures.append(f"{policy.name}: bytes must be at most {BYTES[policy.inputs]}x")
    print_steps(size)
    print("\nall gradients of the example GPT, relative error")
    for saved, limit in ERRORS.items():
        found = {dtype: error(saved, dtype) for dtype in (torch.float32, torch.bfloat16)}
        text = ", ".join(f"{e:.2%} in {str(d).removeprefix('torch.')}" for d, e in found.items())
        print(f"  {saved:<8}{text}")
        if found[torch.float32] > limit:
            failures.append(f"{saved}: the error must be at most {limit:.1%}")
    for line in failures if options.check else []:
        print(f"[saved_formats] {line}", file=sys.stderr)
    return 1 if options.check and failures else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small block, 2 seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit 1 beyond a limit")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
