"""Plans for CUDA under a recipe, made of those for the CPU: products take codes and scales.
Kernels of the CPU run them, or emulated ones."""

from __future__ import annotations

import re

import torch
from torch import Tensor

import transformer_ops as tops
from transformer_ops.plan.plan import Plan
from transformer_ops.recipe import Recipe

o = torch.ops.transformer_ops

DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def cuda_plan(plan: Plan) -> str:
    """What a plan for the CPU is for CUDA."""
    text = with_pairs_of_codes(with_scales_of_blocks(with_calls_that_round(str(plan))))
    for format, dtype in DTYPES.items():
        text = text.replace(f'"{format}", "bfloat16")', f'"{format}", "{dtype}")')
    assert text != str(plan)
    return text


def with_calls_that_round(text: str) -> str:
    """With rounding as a call of its own, which only the CPU does where a value is made."""
    call = re.compile(r'  (.*), (\S+) = (\S+)_rounded\((.*), "([^"]*)", "([^"]*)"\)')
    start = text.index("\nbackward ") + 1 if "\nbackward " in text else len(text)
    passes = []
    for lines in (text[:start].splitlines(), text[start:].splitlines()):
        # What was rounded in place of a value: boundary i lies before op i, which reads it.
        names = {
            value: f"t{int(value[1:]) - 1}.rounded_grad_output"
            if value[0] == "g"
            else f"t{value[1:]}.rounded_input"
            for value in (m[1].split(", ")[0] for m in map(call.fullmatch, lines) if m)
        }
        for line in lines:
            found = call.fullmatch(line)
            if found is None:
                passes.append(with_operands(line, names))
                continue
            results, columns, op, arguments, format, column_format = found.groups()
            value = results.split(", ")[0]
            passes.append(f"  {results} = {op}({arguments})")
            # What backward computes again is behind the gradient that ties it there.
            again = op.startswith("recompute_")
            use, tie = ("_saved", arguments.split(", ")[0] + ", ") if again else ("", "")
            for name, wanted in ((names[value], format), (columns, column_format)):
                if wanted:
                    rounding = f'quantize_dequantize{use}({tie}{value}, "{wanted}", "bfloat16")'
                    passes.append(f"  {name} = {rounding}")
    return "\n".join(passes) + "\n"


def with_operands(line: str, names: dict[str, str]) -> str:
    """A product takes what was rounded; a value that ties a call to backward is as good as it."""
    if " = linear" not in line:
        return line
    for value, name in names.items():
        line = re.sub(rf"([(, ]){value}([,)])", rf"\1{name}\2", line)
    return line


def with_scales_of_blocks(text: str) -> str:
    """Of formats that have them, as in "mx e4m3"."""
    operand = r"t\d+\.rounded_\w+"
    text, found = re.subn(
        rf'({operand}) = quantize_dequantize(_saved)?\((.*"[^"]* [^"]*"), "bfloat16"\)',
        r"\1, \1_scale = quantize\2(\3)",
        text,
    )
    if not found:
        return text
    text, found = re.subn(
        rf"= (\w+)\((({operand}).*?({operand}).*)\)\n",
        r"= \1_scaled(\2, \3_scale, \4_scale)\n",
        text,
    )
    assert found > 0
    return text


def with_pairs_of_codes(text: str) -> str:
    """Of NVFP4, along the sum of the product that takes them."""

    def encoding(found: re.Match[str]) -> str:
        use, arguments, format = found.groups()
        sums_rows = use == "_saved" or format.endswith("16x1")
        return f'quantize{"_columns" if sums_rows else ""}{use or ""}({arguments}, "{format}")'

    call = r'quantize_values(_saved|_stochastic)?\((.*), "(nvfp4.*?)", "bfloat16"\)'
    return re.sub(call, encoding, text)


def run_for_cuda(module: tops.Sequential, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the parameters by the plan for CUDA."""
    plan = module.plans()[0]
    parameters = [p.detach().requires_grad_() for p in module.parameters()]
    owners = [m for m in module for _ in getattr(m, "basic_ops", [m])]
    states = [getattr(owners[value.op], value.name) for value in plan.states]
    y = o.run_plan(cuda_plan(plan), x, [], [*parameters, *states])[0]
    return [y, *torch.autograd.grad(y.float().square().sum(), parameters)]


def step(module: tops.Sequential, x: Tensor, recipe: Recipe) -> list[Tensor]:
    """The same by the module's own plan under a recipe."""
    with tops.autocast(recipe=recipe):
        y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(module.parameters()))]


def block(width: int, hidden: int) -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(
        tops.RMSNorm(width),
        tops.Linear(width, hidden),
        tops.GELU(),
        tops.Linear(hidden, 2 * width, bias=False),
        tops.SwiGLU(),
        tops.Linear(width, width),
    ).bfloat16()


def assert_near_in_norm(found: list[Tensor], want: list[Tensor], error: float = 2**-6) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert (a.to(b.device) - b).double().norm() <= error * b.double().norm()


def check_that_no_host_reads_a_number(module: tops.Sequential, x: Tensor) -> None:
    with torch.profiler.profile() as profile:
        run_for_cuda(module, x)
    names = {event.name for event in profile.events()}
    assert any("linear_scaled" in name for name in names)
    assert any("linear_backward_scaled" in name for name in names)
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}


def check_that_compiled_code_has_no_break(
    module: tops.Sequential, x: Tensor, *, dynamic: bool | None = None, error: float = 2**-6
) -> None:
    text, want = cuda_plan(module.plans()[0]), run_for_cuda(module, x)
    parameters = [p.detach().requires_grad_() for p in module.parameters()]
    run = torch.compile(
        lambda x, given: o.run_plan(text, x, [], given)[0], fullgraph=True, dynamic=dynamic
    )
    y = run(x, parameters)
    got = [y, *torch.autograd.grad(y.float().square().sum(), parameters)]
    assert_near_in_norm(got, want, error)


def check_a_captured_step(module: tops.Sequential, x: Tensor, recipe: Recipe) -> None:
    """On a GPU, in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(module, x, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(module, x, recipe)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(results, step(module, x, recipe), strict=True):
        torch.testing.assert_close(got, want)
