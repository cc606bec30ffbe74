"""The example of docs/adding-an-op.md compiles, loads as an extension, and behaves like an op."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import transformer_ops as tops

ROOT = Path(__file__).parent.parent


def block(language: str) -> str:
    page = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert len(found) == 1
    return found[0]


def with_output_saved(declaration: str) -> str:
    """The same op as OutputSoftcap, whose backward reads its output, with no replay."""
    changes = {
        '"Softcap"': '"OutputSoftcap"',
        '"softcap': '"output_softcap',
        '{{"input"}}': '{{"output"}}',
        "Tensor grad_output, Tensor input": "Tensor grad_output, Tensor output",
        "at::tanh(to_accumulate(args.tensor(1)) / args.number(2))": (
            "to_accumulate(args.tensor(1)) / args.number(2)"
        ),
    }
    for old, new in changes.items():
        assert old in declaration
        declaration = declaration.replace(old, new)
    return declaration


@pytest.fixture(scope="module")
def softcap(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class of the example, after its declaration was compiled and loaded."""
    folder = tmp_path_factory.mktemp("softcap")
    sources = [folder / "softcap.cpp", folder / "output_softcap.cpp"]
    library = folder / "libsoftcap.so"
    sources[0].write_text(block("cpp"), encoding="utf-8")
    sources[1].write_text(with_output_saved(block("cpp")), encoding="utf-8")
    package = Path(tops.__file__).parent
    paths = [ROOT / "csrc", *include_paths()]
    subprocess.run(
        [
            *(os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-shared", "-fPIC", "-w"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in paths),
            *(str(source) for source in sources),
            *("-o", str(library), f"-L{package}", "-ltransformer_ops"),
        ],
        check=True,
    )
    torch.ops.load_library(str(library))
    names: dict[str, Any] = {}
    exec(block("python"), names)
    return names["Softcap"]


def test_it_is_an_op_like_any_other(softcap: Any) -> None:
    module = tops.Sequential(tops.Linear(8, 8), softcap(2.0)).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = 2 * torch.tanh(torch.nn.functional.linear(x, module[0].weight, module[0].bias) / 2)
    torch.testing.assert_close(module(x), expected)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))
    assert [step.name for step in module.plans()[0].forward] == ["linear_bias", "Softcap"]
    assert "2.input 64" in str(module.explain())


def test_it_compiles(softcap: Any) -> None:
    module = tops.Sequential(softcap(2.0))
    x = torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def test_its_errors_are_clear(softcap: Any) -> None:
    with pytest.raises(ValueError, match=r"\[Softcap\] cap must"):
        softcap(float("nan"))
    with pytest.raises(RuntimeError, match=r"\[softcap\] input must be float16"):
        tops.Sequential(softcap(2.0))(torch.ones(3, dtype=torch.int64))


def test_second_derivatives_need_the_input_or_a_replay(softcap: Any) -> None:
    class OutputSoftcap(softcap):
        _kind = "OutputSoftcap"

    module = tops.Sequential(OutputSoftcap(2.0)).double()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    with pytest.raises(NotImplementedError, match=r"\[OutputSoftcap\] double backward must have"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
