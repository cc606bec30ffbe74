"""What the library takes the processor for, and TRANSFORMER_OPS_ISA, which names a smaller one."""

from __future__ import annotations

import ast
import platform
import re

import pytest
from test_memory import HEADER, run_script

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops._loader import build_info

# Widest first, and the kernels for each.
LEVELS = {
    "x86_64": {
        "avx512_fp16": "avx512",
        "avx512_bf16": "avx512",
        "avx512": "avx512",
        "avx2": "avx2",
        "default": "default",
    },
    "aarch64": {"neon_bf16": "default", "default": "default"},
}.get(platform.machine(), {})
pytestmark = pytest.mark.skipif(not LEVELS, reason="the library knows one level of this processor")
# The variable is read once, so every value has a process of its own.
SCRIPT = (
    HEADER
    + f"""
import sys
x, w, bias = torch.randn(40, 700), torch.randn(300, 700), torch.randn(300)
def answer(level):
    os.environ.pop("TRANSFORMER_OPS_ISA", None)
    if level is not None:
        os.environ["TRANSFORMER_OPS_ISA"] = level
    try:
        found = tops.processor()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    errors = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b, c = x.to(dtype), w.to(dtype) / 32, bias.to(dtype)
        want = torch.nn.functional.silu(a.double() @ b.double().t() + c.double())
        got = computed(a, b, c)
        errors.append(float((got.double() - want).norm() / want.norm() / torch.finfo(dtype).eps))
    return tuple(found), errors
def computed(a, b, c):
    return torch.ops.transformer_ops.linear_bias_activation(a, b, c, "silu", False)[0]
for level in (None, "sse9", "", *{list(LEVELS)}):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print(repr(answer(level)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
)


@pytest.fixture(scope="module")
def answers() -> list[str | tuple[tuple[object, ...], list[float]]]:
    """Without the variable, with two values that name no level, and with each level."""
    return [ast.literal_eval(line) for line in run_script(SCRIPT).splitlines()]


def kernels_for(level: str) -> str | None:
    """What was built for it, or for the next lower one."""
    left_out = re.findall(r"CPU kernels for ([\w, ]+) \(", build_info().LEFT_OUT)
    missing = left_out[0].split(", ") if left_out else []
    below = list(LEVELS)[list(LEVELS).index(level) :]
    return next((LEVELS[name] for name in below if LEVELS[name] not in missing), None)


def test_any_machine_may_be_taken_for_a_smaller_one(answers) -> None:
    (machine, _), *others = answers
    names = list(LEVELS)
    usable = [level for level in names[names.index(machine[0]) :] if kernels_for(level) is not None]
    assert usable == _C.processor_levels()
    assert machine == expected(usable[0], machine)
    rule = (
        "[kernels] TRANSFORMER_OPS_ISA must be one that this machine has and the library was built "
        f"for ({', '.join(usable)}; TRANSFORMER_OPS_NATIVE=OFF builds it for all)"
    )
    for level, found in zip(["sse9", "", *LEVELS], others, strict=True):
        if level in usable:
            assert found[0] == expected(level, machine)
        else:
            assert found == f"{rule}, got {level}"


def expected(level: str, machine: tuple[object, ...]) -> tuple[object, ...]:
    bfloat16, float16 = level.endswith(("_bf16", "_fp16")), level == "avx512_fp16"
    # On AMD processors.
    prefers_onednn = machine[4] and level.startswith("avx512")
    return (level, kernels_for(level), bfloat16, float16, prefers_onednn)


def test_every_level_computes_the_same(answers) -> None:
    # PyTorch's own linear of float32 is off by 6 in these units on aarch64.
    most = 8 if platform.machine() == "aarch64" else 4
    for found in answers:
        if not isinstance(found, str):
            assert all(error < most for error in found[1]), found


def test_what_the_library_says() -> None:
    found = tops.processor()
    assert found == tops.Processor(*expected(found.level, tuple(found)))  # type: ignore[arg-type]
