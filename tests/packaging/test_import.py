"""What `import transformer_ops` and eager work load: nothing that the program does not use."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import transformer_ops as tops
from transformer_ops.base import marks

pytestmark = pytest.mark.takes(seconds=15)

# What takes as long as `import torch`, and packages that torch does without.
HEAVY = {
    "matplotlib",
    "onnx",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
}


def run_fresh(code: str, stderr: int = subprocess.PIPE) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, set[str]]:
    """The modules that there are after each part of WORK, and the typed ops then."""
    lines = [line.split() for line in run_fresh(WORK).splitlines()]
    return {after: set(names) for after, *names in lines}


def test_the_import_loads_itself_and_the_standard_library(seen: dict[str, set[str]]) -> None:
    loaded = seen["package"] - seen["torch"]
    tops = {name for name in loaded if name.partition(".")[0] == "transformer_ops"}
    assert "transformer_ops.modules.sequential" in tops
    rest = {name.partition(".")[0] for name in loaded - tops}
    assert rest <= sys.stdlib_module_names
    assert not HEAVY & loaded


# What an eager program does with a Sequential.
WORK = """
import sys, torch

def loaded(after):
    print(after, *sys.modules)

loaded("torch")
import transformer_ops as tops
loaded("package")
names = {s.name for s in torch._C._jit_get_all_schemas()}
print("schemas", *(n for n in names if n.startswith("transformer_ops::")))
import copy, pickle

block = tops.Sequential(
    tops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
    tops.LayerNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32), tops.Dropout(0.1),
    tops.AddExtraInput().set_extra_input_channel(0, "residual"),
)
x = torch.randn(32, 32, requires_grad=True)
block(x).sum().backward()
loaded("step")
block[1](x).sum().backward()
loaded("op")
with tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()):
    block(x).sum().backward()
loaded("recipe")
str(block.explain()), block.explain()._repr_html_(), block.plans()
loaded("explain")
pickle.loads(pickle.dumps(block)).load_state_dict(copy.deepcopy(block).state_dict())
loaded("copies")
with tops.register_forward_fusion(lambda ops, **_: ops):
    block(x)
loaded("fusion")
block.recompute = "none"
block.append(tops.ReLU())
block.double()(x.double())
loaded("edits")
experts, splits = tops.GroupedLinear(2, 32, 32), torch.tensor([16, 16])
buffers = {"output": torch.empty(32, 32)}
with torch.no_grad():
    experts(x, splits, **buffers)
    tops.Sequential(experts)(x, splits, op_kwargs={0: buffers})
loaded("buffers")
torch.ops.transformer_ops.gelu(x).sum().backward()
loaded("typed_op")
import torch._dynamo
loaded("compiler")
"""


def test_eager_work_loads_no_compiler(seen: dict[str, set[str]]) -> None:
    parts = re.findall(r'^loaded\("(\w+)"\)$', WORK, re.MULTILINE)
    assert parts == [part for part in seen if part != "schemas"]
    for after in parts[1:-1]:
        assert not HEAVY & seen[after] - seen["torch"], after


def test_the_modules_would_be_seen(seen: dict[str, set[str]]) -> None:
    assert {"torch._dynamo", "sympy"} <= seen["compiler"]


# ---- typed ops get their gradients at the first one

TYPED = """
import torch, transformer_ops
torch.manual_seed(0)
x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
op = torch.ops.transformer_ops.rms_norm
def loss(x, w):
    return op(x, w, [8], 1e-5, False)[0].sin().sum()
def check(function):
    want = torch.nn.functional.rms_norm(x, (8,), w, 1e-5).sin().sum()
    pair = (torch.autograd.grad(y, (x, w)) for y in (function(x, w), want))
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b)
"""
FIRST = {
    "eager": "check(loss)",
    "after a call without": """
with torch.no_grad():
    loss(x, w)
check(loss)
""",
    "compiled": "check(torch.compile(loss, backend='aot_eager', fullgraph=True))",
    "fake": """
from torch._subclasses import FakeTensorMode
mode = FakeTensorMode()
given = mode.from_tensor(x), mode.from_tensor(w)
assert [g.shape for g in torch.autograd.grad(loss(*given), given)] == [x.shape, w.shape]
""",
    "opcheck": "torch.library.opcheck(op.default, (x, w, [8], 1e-5, False))",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    for _ in pool.map(lambda _: check(loss), range(16)):
        pass
""",
    # It has a kernel of a user's.
    "another device": """
from torch.utils import backend_registration
backend_registration._setup_privateuseone_for_python_backend("somewhere")

class There(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor):
        make = torch.Tensor._make_wrapper_subclass
        return make(cls, tensor.shape, dtype=tensor.dtype, device="somewhere")

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = [a.tensor if isinstance(a, There) else a for a in args]
        found = func(*given, **(kwargs or {}))
        return tuple(map(There, found)) if isinstance(found, tuple) else There(found)

y = op(There(x.detach()).requires_grad_(), There(w.detach()), [8], 1e-5, False)[0]
assert "rms_norm" in type(y.grad_fn).__name__, y.grad_fn
""",
}


# Each in a copy of a process that has loaded all and has computed no gradient.
COPIES = f"""
{TYPED}
import os
for what, script in {FIRST!r}.items():
    if what == "compiled":
        import torch._dynamo  # for all that follow
    child = os.fork()
    if child == 0:
        exec(script)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"{{what}} ended with {{status}}", flush=True)
"""


@pytest.fixture(scope="module")
def first_gradients() -> str:
    """What the scripts of FIRST print, and how each ended."""
    return run_fresh(COPIES, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("what", FIRST)
def test_the_first_gradient_of_a_typed_op(what: str, first_gradients: str) -> None:
    assert f"{what} ended with 0" in first_gradients.splitlines(), first_gradients


# ---- marks are what the decorators of torch leave


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert marks.constant(ours) is ours
    torch.compiler.assume_constant_result(theirs)  # type: ignore[no-untyped-call]
    assert vars(ours) == vars(theirs) != {}


def test_a_disabled_function_ends_the_graph_as_torch_ends_it() -> None:
    ours = marks.disabled("a reason")(plus_one)
    theirs = torch.compiler.disable(plus_one, reason="a reason")  # type: ignore[no-untyped-call]
    found = []
    for function in (ours, theirs):

        def call(x: torch.Tensor, function=function) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return 2 * function(x.sin())

        x = torch.randn(3)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as error:
            torch.compile(call, backend="eager", fullgraph=True)(x)
        said = str(error.value).replace(str(function), "FUNCTION")
        counter = torch._dynamo.testing.CompileCounter()
        torch.testing.assert_close(torch.compile(call, backend=counter)(x), call(x))
        found.append((said.split("from user code")[0], counter.frame_count, counter.op_count))
    assert found[0] == found[1]
    assert "(reason: a reason)" in found[0][0]
    # What the function does is in no graph.
    assert found[0][1:] == (2, 2)


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_with_buffers_ends_the_graph_for_its_reason(whole: bool) -> None:
    experts = tops.GroupedLinear(2, 8, 8)
    x, splits, out = torch.randn(4, 8), torch.tensor([2, 2]), torch.empty(4, 8)
    module = tops.Sequential(experts)

    def call(x: torch.Tensor) -> torch.Tensor:
        if whole:
            found: torch.Tensor = module(x, splits, op_kwargs={0: {"output": out}})
        else:
            found = experts(x, splits, output=out)
        return found

    with torch.no_grad():
        want = experts(x, splits)
        with pytest.raises(Exception, match="buffers of the caller's must be given outside of"):
            torch.compile(call, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(torch.compile(call, backend="eager")(x), want)
        torch.testing.assert_close(out, want)


# ---- what is there then


def test_dir_holds_the_public_api_alone() -> None:
    names = dir(tops)
    assert set(tops.__all__) <= set(names) and set(names) - set(tops.__all__) == {
        "__version__",
        "parallel",
    }
    assert all(hasattr(tops, name) for name in names)
    for module in ("base", "compile", "modules", "op", "plan", "reports", "runtime"):
        assert module not in names


def test_names_that_load_late_are_the_public_ones() -> None:
    package = tops.quantization
    assert set(package._HOMES) == set(package.__all__) == set(dir(package))
    for name, home in package._HOMES.items():
        assert getattr(package, name).__module__ == f"{package.__name__}.{home}"


def test_torch_has_a_typed_op_for_what_programs_call(seen: dict[str, set[str]]) -> None:
    """Forms that plans alone need have no schema: `run_call` names them."""
    names = seen["schemas"]
    assert 100 < len(names) <= 151
    forms = ("_rounded", "_rounded_scaled", "_saved")
    assert not [n for n in names if n.endswith(forms) or n.startswith("transformer_ops::recompute")]
