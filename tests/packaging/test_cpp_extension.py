"""Libraries of others: examples/cpp_extension/ against an installed copy, and wrong ones."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_projects import ROOT, build, check_commands, configure, install_copy, tool
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.utils.flop_counter import FlopCounterMode

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.fusion import registry
from transformer_ops.testing import check_fusion

pytestmark = pytest.mark.takes(seconds=35)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_copy(tmp_path_factory.mktemp("installed"))


def build_project(source: Path, folder: Path, installed: Path, target: str) -> None:
    done = configure(source, folder, installed / "share" / "cmake", torch.utils.cmake_prefix_path)
    assert done.returncode == 0, done.stdout + done.stderr
    build(folder, target)


@pytest.fixture(scope="module")
def my_ops(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The example's package, built by the commands of its README in a folder of its own."""
    folder = tmp_path_factory.mktemp("example") / "cpp_extension"
    shutil.copytree(ROOT / "examples" / "cpp_extension", folder)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"^ {4}(.*)$", readme, re.MULTILINE))
    assert commands.count("cmake") > 2 and "python demo.py" in commands
    programs = [str(Path(path).parent) for path in (sys.executable, tool("cmake"), tool("ninja"))]
    search = os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)])
    environment = os.environ | {
        "PATH": search,
        "PYTHONPATH": str(installed.parent),
        "CMAKE_GENERATOR": "Ninja",
    }
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_commands(folder / "build", "my_ops")
    (folder / "printed.txt").write_text(done.stdout)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("my_ops")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def late_ops(my_ops: Any, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late_ops")
    build_project(ROOT / "tests" / "cpp" / "extension", folder, installed, "late_ops")
    return folder / "liblate_ops.so"


def edited(library: Path, folder: Path, old: str, new: str) -> Path:
    """A copy with another text in its tag."""
    content = library.read_bytes()
    assert len(old) == len(new) and content.count(old.encode()) == 1
    copy = folder / f"lib{new.split()[-1]}.so"
    copy.write_bytes(content.replace(old.encode(), new.encode()))
    return copy


def named(library: Path, folder: Path, name: str) -> Path:
    """A copy under another name of as many letters."""
    return edited(library, folder, "library late_ops", f"library {name}")


def has_op(name: str, op: str) -> bool:
    return hasattr(getattr(torch.ops, name), op)


def registered_by(name: str) -> list[str]:
    """All that is registered under the name of a library."""
    kinds = [row["kind"] for row in _C.declarations()]
    pairs = [op for pair in _C.typed_op_pairs() for op in pair]
    rules = [handle.name for handle in tops.fusions()]
    ops = [schema.name for schema in torch._C._jit_get_all_schemas()]
    origins = [handle.origin for handle in tops.fusions()]
    found = [text for text in kinds + pairs + rules + ops if text.startswith(f"{name}::")]
    return found + [origin for origin in origins if origin == name]


# ---- the example


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 8), (0, 8), (5,), (300, 700)])
def test_values_and_gradients(my_ops: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (5 * torch.randn(shape)).to(dtype).requires_grad_()
    module = tops.Sequential(my_ops.Softcap(2.0))
    reference = x.detach().double().requires_grad_()
    atol = 6 * torch.finfo(dtype).eps
    for op in (module, module[0], lambda x: torch.ops.my_ops.softcap(x, 2.0)):
        got, want = op(x), softcap(reference, 2.0)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0.0, atol=atol)
        (grad,) = torch.autograd.grad(got.sum(), x)
        (want_grad,) = torch.autograd.grad(want.sum(), reference)
        torch.testing.assert_close(grad.double(), want_grad, rtol=0.0, atol=atol)


def test_the_typed_ops_are_the_library_s_own(my_ops: Any) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert not has_op("transformer_ops", "linear_softcap")
    torch.library.opcheck(torch.ops.my_ops.softcap.default, (x, 2.0))
    torch.library.opcheck(torch.ops.my_ops.softcap_backward.default, (x, x.detach(), 2.0))
    assert torch.autograd.gradcheck(lambda x: torch.ops.my_ops.softcap(x, 2.0), (x,))
    with pytest.raises(RuntimeError, match=r"^\[my_ops::softcap\] input must be float16, bfloat16"):
        torch.ops.my_ops.softcap(torch.ones(3, dtype=torch.int64), 2.0)
    with pytest.raises(ValueError, match=r"\[Softcap\] cap must be a finite number > 0, got -1"):
        my_ops.Softcap(-1)


def test_second_derivatives(my_ops: Any) -> None:
    module = tops.Sequential(tops.Linear(4, 4), my_ops.Softcap(2.0)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(lambda x: torch.ops.my_ops.softcap(x, 2.0), (x,))


def test_the_plan_names_rule_and_ops(my_ops: Any) -> None:
    module = tops.Sequential(tops.Linear(4, 8, bias=False), my_ops.Softcap(2.0))
    module(torch.randn(3, 4, requires_grad=True)).sum().backward()
    (plan,) = module.plans()
    assert [step.name for step in plan.forward] == ["my_ops::linear_softcap"]
    assert [step.name for step in plan.backward] == ["BasicLinear", "my_ops::Softcap"]
    text = str(plan)
    assert "op 1 my_ops::Softcap cap=2.0" in text
    assert "x2 = my_ops::linear_softcap(x0, p0.weight, 2.0)" in text
    assert "g1 = my_ops::softcap_backward(g2, s1.output, 2.0)" in text
    assert str(tops.Plan.parse(text)) == text
    (rule,) = (handle for handle in tops.fusions() if handle.origin == "my_ops")
    assert (rule.name, rule.pass_name) == ("my_ops::linear_softcap", "forward")
    explanation = module.explain()
    (row,) = explanation.groups[0].forward
    assert (row.runs, row.made_by) == ("BasicLinear + my_ops::Softcap", rule.name)
    assert rule.name in str(explanation) and "from my_ops" not in str(explanation)


def test_an_op_made_of_rows_rounds_what_a_product_takes(my_ops: Any) -> None:
    module = tops.Sequential(my_ops.Softcap(2.0), tops.Linear(64, 8, bias=False)).bfloat16()
    x = torch.randn(3000, 64).bfloat16()
    with tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()), torch.no_grad():
        output = module(x)
        weight = torch.ops.transformer_ops.quantize_dequantize(
            module[1].weight, "mx e4m3", "bfloat16"
        )
    text = str(module.plans()[0])
    assert 'x1, t1.unused = my_ops::softcap.rounded(x0, 2.0, "mx e4m3", "")' in text
    capped = torch.ops.my_ops.softcap(x, 2.0)
    rounded = torch.ops.transformer_ops.quantize_dequantize(capped, "mx e4m3", "bfloat16")
    assert torch.equal(output, torch.ops.transformer_ops.linear(rounded, weight))


def test_check_fusion_of_the_rule(my_ops: Any) -> None:
    (rule,) = (handle for handle in tops.fusions() if handle.origin == "my_ops")

    def make(bias: bool = False) -> list[Any]:
        return [tops.Linear(6, 8, bias=bias), my_ops.Softcap(0.5)]

    check_fusion(rule, make, torch.randn(4, 6))
    with pytest.raises(AssertionError, match=r"\[my_ops::linear_softcap\] must fire in forward"):
        check_fusion(rule, lambda: make(bias=True), torch.randn(4, 6))


def test_python_steps_over_the_op(my_ops: Any) -> None:
    class ScaledBackward(tops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
            capped, scaled = basic_op_ctxs
            (y,) = capped.saved_tensors
            slope = 1 - (y / capped.attributes["cap"]) ** 2
            return grad_output * scaled.attributes["scale"] * slope, [(), ()], [(), ()]

    check_fusion(
        ScaledBackward,
        lambda: [tops.Linear(6, 8, bias=False), my_ops.Softcap(2.0), tops.ConstantScale(3.0)],
        torch.randn(4, 6),
        kind="backward",
        pattern=[my_ops.Softcap, tops.ConstantScale],
    )


def test_compile_and_export(my_ops: Any) -> None:
    module = tops.Sequential(tops.Linear(4, 8, bias=False), my_ops.Softcap(2.0))
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    want = torch.autograd.grad(module(x).sum(), [x, module[0].weight])
    got = torch.autograd.grad(compiled(x).sum(), [x, module[0].weight])
    torch.testing.assert_close(got, want)
    typed = torch.compile(lambda x: torch.ops.my_ops.softcap(x, 2.0), fullgraph=True)
    torch.testing.assert_close(typed(x), softcap(x, 2.0))

    program = export(module, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
    more = torch.randn(7, 4)
    torch.testing.assert_close(program.module()(more), module(more))
    nodes = program.run_decompositions().graph.nodes
    targets = {str(node.target) for node in nodes if node.op == "call_function"}
    assert "my_ops.linear_softcap.default" in targets


def test_an_exported_program_needs_the_library_alone(my_ops: Any, tmp_path: Path) -> None:
    module = tops.Sequential(tops.Linear(4, 8, bias=False), my_ops.Softcap(2.0))
    x = torch.randn(3, 4)
    torch.export.save(export(module, (x,)), tmp_path / "program.pt2")
    torch.save((x, module(x).detach()), tmp_path / "tensors.pt")
    code = (
        "import torch, my_ops; from torch import load\n"
        f"x, want = load({str(tmp_path / 'tensors.pt')!r})\n"
        f"module = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()\n"
        "torch.testing.assert_close(module(x), want)\n"
    )
    path = [str(Path(my_ops.__file__).parent.parent), str(Path(tops.__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_the_example(my_ops: Any) -> None:
    text = (ROOT / "docs" / "cpp-extension.md").read_text(encoding="utf-8")
    page = re.sub(r"^## Slots .*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    package = Path(my_ops.__file__).parent
    files = {"cpp": package.parent / "my_ops.cpp", "py": package / "__init__.py"}
    for language, file in files.items():
        blocks = re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert blocks and all(block in file.read_text() for block in blocks)
    (shown,) = re.findall(r"prints\n\n```text\n(.*?)```\n", page, re.DOTALL)
    assert (package.parent / "printed.txt").read_text().endswith(shown)


# ---- libraries that come later


def test_a_late_rule_is_one_recompilation(
    my_ops: Any, late_ops: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = tops.Sequential(my_ops.Softcap(2.0), tops.ConstantScale(3.0))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(3, 8, requires_grad=True)
    want = compiled(x)
    assert counter.frame_count == 1
    monkeypatch.setenv("LATE_OPS", "rule")
    assert tops.load_library(named(late_ops, tmp_path, "one_rule")) == "one_rule"
    for _ in range(3):
        torch.testing.assert_close(compiled(x), want)
    assert counter.frame_count == 2
    torch.testing.assert_close(module(x), want)
    assert [step.name for step in module.plans()[0].forward] == ["one_rule::softcap_scale"]
    (rule,) = (handle for handle in tops.fusions() if handle.origin == "one_rule")
    check_fusion(rule, lambda: [my_ops.Softcap(2.0), tops.ConstantScale(3.0)], x)


def test_check_fusion_finds_a_wrong_rule(
    my_ops: Any, late_ops: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LATE_OPS", "wrong rule")
    library = named(late_ops, tmp_path, "bad_rule")
    others = [h for h in tops.fusions() if h.name.endswith("::softcap_scale")]
    tops.load_library(library)
    (rule,) = (handle for handle in tops.fusions() if handle.origin == "bad_rule")
    for handle in others:
        handle.remove()
    with pytest.raises(AssertionError, match=r"\[bad_rule::softcap_scale\] eager: output differs"):
        check_fusion(rule, lambda: [my_ops.Softcap(2.0), tops.ConstantScale(3.0)], torch.randn(3))
    rule.remove()


def test_two_libraries_may_use_one_name(my_ops: Any, late_ops: Path, tmp_path: Path) -> None:
    def make_class() -> Any:
        class Softcap(tops.BasicOperation, kind="two_caps::Softcap"):
            """Without an attribute."""

        return Softcap

    with pytest.raises(RuntimeError, match="kind must be declared, got 'two_caps::Softcap'"):
        make_class()
    assert tops.load_library(str(named(late_ops, tmp_path, "two_caps"))) == "two_caps"
    Softcap = make_class()
    module = tops.Sequential(Softcap(), my_ops.Softcap(2.0))
    x = torch.randn(3)
    torch.testing.assert_close(module(x), softcap(2 * torch.tanh(x), 2.0))
    text = str(module.plans()[0])
    assert "two_caps::softcap(x0)" in text and "my_ops::softcap(x1, 2.0)" in text


def test_many_threads_load_one_library(late_ops: Path, tmp_path: Path) -> None:
    library = named(late_ops, tmp_path, "threaded")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tops.load_library, [library] * 8))
    assert found == ["threaded"] * 8
    assert _C.registry_version() == registry.VERSION
    assert sorted(registered_by("threaded")) == sorted(
        ["threaded::Good", "threaded::Softcap"] + 2 * ["threaded::good", "threaded::softcap"]
    )


def test_a_library_that_torch_loads(
    late_ops: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = named(late_ops, tmp_path, "by_torch")
    torch.ops.load_library(library)
    x = torch.randn(3)
    torch.testing.assert_close(torch.ops.by_torch.softcap(x), 2 * torch.tanh(x))
    before = registered_by("by_torch")
    assert tops.load_library(library) == "by_torch"
    assert registered_by("by_torch") == before


def test_what_is_wrong_is_said_where_torch_loads(
    late_ops: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    library = named(late_ops, tmp_path, "not_load")
    monkeypatch.setenv("LATE_OPS", "empty pattern")
    torch.ops.load_library(library)
    error = capfd.readouterr().err
    assert "nothing of a library is registered: [fusion] pattern of 'not_load::" in error
    assert registered_by("not_load") == []
    with pytest.raises(ImportError, match=r"\[not_load\] library must be new to the process"):
        tops.load_library(library)


# ---- what may be wrong with a library


def test_the_same_file_again(my_ops: Any, late_ops: Path, tmp_path: Path) -> None:
    library = named(late_ops, tmp_path, "same_one")
    assert tops.load_library(library) == "same_one"
    before, version = registered_by("same_one"), _C.registry_version()
    (tmp_path / "link.so").symlink_to(library)
    assert tops.load_library(tmp_path / "link.so") == tops.load_library(library) == "same_one"
    assert (registered_by("same_one"), _C.registry_version()) == (before, version)

    other = tmp_path / "other" / "libsame_one.so"
    other.parent.mkdir()
    shutil.copy(library, other)
    message = (
        rf"\[load_library\] library must have a new name, got 'same_one' of \"{other}\", "
        rf"which \"{library}\" has brought"
    )
    with pytest.raises(ImportError, match=message):
        tops.load_library(other)

    library.unlink()
    shutil.copy(other, library)
    with pytest.raises(ImportError, match=r"got a newer build of '.*': start a new process"):
        tops.load_library(library)
    assert registered_by("same_one") == before


def test_flops_of_a_library(
    late_ops: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LATE_OPS", "product")
    # The counter is loaded already: no import is left that could bring the formulas.
    assert FlopCounterMode(display=False).get_total_flops() == 0
    tops.load_library(named(late_ops, tmp_path, "mul_ops_"))
    x, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (3, 8))
    with FlopCounterMode(display=False) as counter:
        output = torch.ops.mul_ops_.product(x, weight)
        assert counter.get_total_flops() == 2 * 3 * 8 * 8
        output.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 3 * 8 * 8
    with FlopCounterMode(display=False) as counter:
        torch.ops.mul_ops_.product(x.detach(), weight).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 3 * 8 * 8


WRONG = {
    "unknown kind": r"\[{}::softcap_scale\] pattern must name kinds that are declared, "
    r"got 'Softcp'",
    "empty pattern": r"\[fusion\] pattern of '{}::softcap_scale' must have an op that is not "
    r"optional, got 0 entries",
    "kind twice": r"\[{}\] kind must be new, got '{}::Good'",
    "typed op twice": r"\[{}\] typed op must have a new name, got '{}::good'",
    "kind of another": r"\[{}\] kind must have no namespace, which is the library's name, "
    r"got 'my_ops::Softcap'",
    "schema": r"\[{}\] schema must be one that torch reads, got '{}::other\(Tensor x, ->",
    "type": r"\[{}\] schema must be one that torch reads, got '{}::other\(Tensor x\) -> Tensr y'",
    "body": r"\[{}::other\] .* must be .* as the schema '.*' says, got .*int64_t",
    "overwrites": r"\[{}::other\] overwrites must name tensor arguments, got 'output'",
    "products": r"\[{}::other\] products must name matrices that are arguments, got 'output'",
    "by rows": r"\[{}::other\] by_rows must name tensor arguments, got 'output'",
    "by rows to lists": r"\[{}::other\] by_rows must be of an op that gives tensors, got one",
    "rounded schema": r"\[{}::other\] by_rows must be of an op without an argument 'format', got",
    "no shape": r"\[{}::softcap_scale\] \.shape must be given unless .*, got none in "
    r"'softcap_scale' for '.*'",
    "throws": "no licence",
    "throws a number": "must throw nothing but std::exception",
}


@pytest.mark.parametrize("what", WRONG)
def test_nothing_of_a_wrong_library_is_registered(
    late_ops: Path, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"wrong_{list(WRONG).index(what):02}"
    library = named(late_ops, tmp_path, name)
    version = _C.registry_version()
    monkeypatch.setenv("LATE_OPS", what)
    with pytest.raises(ImportError, match=WRONG[what].replace("{}", name)):
        tops.load_library(library)
    assert registered_by(name) == [] and _C.registry_version() == version
    # The name is free, and a copy that was mended loads.
    monkeypatch.delenv("LATE_OPS")
    mended = tmp_path / "mended.so"
    shutil.copy(library, mended)
    assert tops.load_library(mended) == name
    assert has_op(name, "good")


@pytest.mark.parametrize("wrong", ["float", "int", "const std::string&"])
def test_the_compiler_says_which_types_a_body_may_have(
    late_ops: Path, wrong: str, tmp_path: Path
) -> None:
    found = subprocess.run(
        [tool("ninja"), "-C", str(late_ops.parent), "-t", "compdb"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(found.stdout)
    (row,) = (row for row in rows if row["file"].endswith("late_ops.cpp"))
    text = Path(row["file"]).read_text(encoding="utf-8")
    right = ".shape = [](const Tensor& input, double, double)"
    assert text.count(right) == 1
    source = tmp_path / "wrong.cpp"
    source.write_text(text.replace(right, right.replace("double, double", f"{wrong}, double")))
    command = [word if word != row["file"] else str(source) for word in shlex.split(row["command"])]
    done = subprocess.run(
        [*command, "-fsyntax-only"],
        cwd=row["directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "must have a type of op/parameter.h: const Tensor& or" in done.stderr


def test_a_name_that_others_have_taken(late_ops: Path, tmp_path: Path) -> None:
    with torch.library._scoped_library("taken_op", "FRAGMENT") as others:
        others.define("good(Tensor x) -> Tensor")
        with pytest.raises(ImportError, match=r"\[taken_op\] typed op must have a new name, got"):
            tops.load_library(named(late_ops, tmp_path, "taken_op"))
    assert registered_by("taken_op") == []


VERSION, TORCH = tops.__version__, ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            f"late_ops for transformer_ops {VERSION}",
            f"oldtops1 for transformer_ops {'9' * len(VERSION)}",
            rf"\[oldtops1\] library must be built for transformer_ops {VERSION}, got one for "
            rf"transformer_ops {'9' * len(VERSION)}: build it again",
        ),
        (
            f"late_ops for transformer_ops {VERSION} and torch {TORCH}",
            f"oldtorch for transformer_ops {VERSION} and torch {'9' * len(TORCH)}",
            rf"\[oldtorch\] library must be built for torch {TORCH}, got one for torch "
            rf"{'9' * len(TORCH)}: build it again",
        ),
    ],
)
def test_a_library_of_another_build(
    late_ops: Path, old: str, new: str, message: str, tmp_path: Path, capfd: Any
) -> None:
    library = edited(late_ops, tmp_path, old, new)
    with pytest.raises(ImportError, match=message):
        tops.load_library(library)
    name = new.split()[0]
    assert registered_by(name) == []
    # No code of it ran; opened by others, it says the same.
    ctypes.CDLL(str(library))
    assert message.replace("\\", "") in capfd.readouterr().err
    assert registered_by(name) == []


def test_what_is_no_library(late_ops: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.so"
    with pytest.raises(FileNotFoundError, match=rf"path must be a file, got '{missing}'"):
        tops.load_library(missing)
    with pytest.raises(FileNotFoundError, match="path must be a file"):
        tops.load_library(tmp_path)
    with pytest.raises(TypeError):
        tops.load_library(3)  # type: ignore[arg-type]
    text = tmp_path / "text.so"
    text.write_text("no library")
    no_tag = Path(_C.__file__).parent / "libtransformer_ops.so"
    for file in (text, no_tag, Path(_C.__file__)):
        with pytest.raises(ImportError, match="must be a library that calls TRANSFORMER_OPS_LIBR"):
            tops.load_library(file)
    cut = tmp_path / "cut.so"
    content = late_ops.read_bytes()
    tag = content.index(b"transformer_ops library late_ops")
    cut.write_bytes(b"no ELF" + content[tag : tag + 200])
    with pytest.raises(ImportError, match=r"library must be one that the system can load, got .*"):
        tops.load_library(cut)
