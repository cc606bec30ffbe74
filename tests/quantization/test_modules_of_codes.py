"""Whole modules whose products multiply codes: the plan for CUDA, by the CPU's kernels or, with
`pytest --emulate-cuda`, by emulated ones; what is said of it; and on a GPU.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from cuda_plans import (
    assert_as_exact,
    assert_near_in_norm,
    block,
    check_a_captured_step,
    check_that_compiled_code_has_no_break,
    check_that_no_host_reads_a_number,
    exact_step,
    on_cuda,
    run_for_cuda,
    step,
)
from test_cublaslt_products import without
from test_products_of_codes import products
from torch import Tensor

import transformer_ops as tops
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import available
from transformer_ops.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

o = torch.ops.transformer_ops


@dataclass(frozen=True)
class Row:
    """A recipe, and the products that cuBLASLt is asked for in a module of that width."""

    recipe: Recipe
    rows: int
    width: int
    hidden: int
    codes: tuple[str, ...]
    # The plan for CUDA has the numbers of the module, bit for bit.
    same: bool = False

    def __str__(self) -> str:
        return f"{type(self.recipe).__name__} {self.recipe.key} {self.rows}x{self.width}"

    def made(self) -> tuple[tops.Sequential, Tensor]:
        return block(self.width, self.hidden), torch.randn(self.rows, self.width).bfloat16()


HYBRID = Format.HYBRID
FP8 = [Float8CurrentScaling(), DelayedScaling(amax_history_len=1)]
BLOCKS = [Float8BlockScaling(), Float8BlockScaling(fp8_format=HYBRID)]
MX = [MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format=HYBRID)]
AT_RANDOM = NVFP4BlockScaling()
NVFP4 = [
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    CustomRecipe(lambda role: "nvfp4"),
    NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all"),
]
OF_BLOCKS = ("e4m3/1x128 e4m3/128x128",)
# The smaller widths have products that are decoded.
ROWS = [
    *(Row(r, 32, width, 96, ("e4m3 e4m3", "e5m2 e4m3")) for r in FP8 for width in (64, 40)),
    *(Row(r, 128, width, 256, OF_BLOCKS) for r in BLOCKS for width in (128, 80)),
    *(Row(r, 128, width, 256, ("e4m3/mx e4m3/mx",)) for r in MX for width in (128, 80)),
    *(Row(r, 64, width, 96, ("nvfp4",), True) for r in NVFP4 for width in (64, 80)),
    *(Row(r, 37, 41, 96, (), True) for r in NVFP4),
]
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
# One of each kind, whose products are all of codes.
FIRST = [Row(r, *size) for r, *size in (
    (FP8[0], 32, 64, 96, ()), (FP8[1], 32, 64, 96, ()), (BLOCKS[0], 128, 128, 256, ()),
    (NVFP4[0], 64, 64, 96, ()),
)]  # fmt: skip
first_rows = pytest.mark.parametrize("row", FIRST, ids=str)


# ---- plans and numbers


@every_row
def test_a_module(row: Row, request: pytest.FixtureRequest) -> None:
    module, x = row.made()
    step(module, x, row.recipe)  # delayed scales are of an earlier step
    want = step(copy.deepcopy(module), x, row.recipe)
    step(module, x, row.recipe)
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    found = run_for_cuda(module, x, row.recipe)
    if emulated:
        lines = products()
        assert all(any(codes in line for line in lines) for codes in row.codes)
        assert any("nvfp4" in line for line in lines) == ("nvfp4" in row.codes)
        assert any("bfloat16 ->" in line for line in lines) == (row.width not in (64, 128))
    if row.same and not emulated:
        for got, right in zip(found, want, strict=True):
            assert got.dtype == torch.bfloat16 and torch.equal(got, right)
        return
    assert_near_in_norm(found, want, error=2**-5 if row.same else 2**-6)


def test_the_plan_of_blocks() -> None:
    """What the planner writes for CUDA is in tests/cpp/fuser/test_lower.cpp."""
    text = str(on_cuda(*FIRST[2].made(), BLOCKS[0]).plans()[0])
    assert str(Plan.parse(text)) == text
    line = '  t1.rounded_weight, t1.rounded_weight_scale = quantize(p1.weight, "e4m3 128x128")\n'
    assert line in text and "quantize_dequantize" not in text
    scales = "t1.rounded_input_scale, t1.rounded_weight_scale"
    assert re.search(rf"= linear_bias_activation_scaled\(.*, {scales}\)\n", text)


def test_the_plan_of_nvfp4() -> None:
    """What the planner writes for CUDA is in tests/cpp/fuser/test_lower_recipes.cpp."""
    text = str(on_cuda(*FIRST[3].made(), AT_RANDOM).plans()[0])
    assert str(Plan.parse(text)) == text
    for line in (
        '  t1.rounded_weight, t1.rounded_weight_scale = quantize(p1.weight, "nvfp4 16x16")\n',
        ' = quantize_columns.saved(g2, s1.weight, "nvfp4 16x16")\n',
        ' = quantize_columns_stochastic(t1.turned_grad_output, "nvfp4 16x1")\n',
    ):
        assert line in text, text
    assert "quantize_values" not in text


@pytest.mark.emulated
@pytest.mark.parametrize("family", ["blocks", "nvfp4"])
def test_elsewhere_a_module_computes_what_the_recipe_says(family: str) -> None:
    """The same operands, bit for bit, and the same random numbers."""
    some = NVFP4 if family == "nvfp4" else BLOCKS + MX
    rows = [row for row in ROWS if row.recipe in some and row.width != 80]
    rows += [Row(AT_RANDOM, 64, width, 96, ()) for width in (64, 41) if family == "nvfp4"]
    for row in rows:
        module, x = row.made()
        torch.manual_seed(3)
        want = step(module, x, row.recipe)
        torch.manual_seed(3)
        with without(family):
            found = run_for_cuda(module, x, row.recipe)
        for got, right in zip(found, want, strict=True):
            assert torch.equal(got, right)


@pytest.mark.emulated
def test_gradients_at_random_are_multiplied_as_codes() -> None:
    module, x = FIRST[3].made()
    torch.manual_seed(3)
    want = step(module, x, AT_RANDOM)
    products()
    torch.manual_seed(3)
    found = run_for_cuda(module, x, AT_RANDOM)
    assert all("nvfp4 nvfp4" in line for line in products())
    for got, right in zip(found, want, strict=True):
        assert (got - right).double().norm() <= 0.35 * right.double().norm()


@first_rows
def test_no_host_reads_a_number(row: Row) -> None:
    check_that_no_host_reads_a_number(*row.made(), row.recipe)


# Blocks are encoded for three inputs and three gradients, along both dimensions, and for three
# weights, whose blocks are the same along both. NVFP4 is encoded for three inputs, weights and
# gradients by rows, and for three inputs and weights by columns. run_call encodes three saved
# operands, and computes three values again.
@pytest.mark.parametrize(
    ("row", "counts"),
    [(FIRST[2], [[12, 6], [9, 6]]), (FIRST[3], [[9, 9], [6, 6]])],
    ids=str,
)
def test_frozen_weights_are_encoded_once(row: Row, counts: list[list[int]]) -> None:
    module, x = row.made()
    text = str(on_cuda(module, x, row.recipe).plans()[0])
    parameters = list(module.parameters())
    found, results = [], []
    with tops.frozen_weights():
        for _ in range(2):
            with torch.profiler.profile() as profile:
                y = o.run_plan(text, x, [], parameters)[0]
                results.append([y, *torch.autograd.grad(y.float().square().sum(), parameters)])
            names = [event.name.split("::")[-1] for event in profile.events()]
            found.append([names.count(name) for name in ("quantize", "run_call")])
    assert found == counts
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("row", "dynamic"),
    [(FIRST[0], None), *((row, way) for row in FIRST[2:] for way in (False, True))],
    ids=str,
)
def test_compiled_code_has_no_break(row: Row, dynamic: bool | None) -> None:
    error = 2**-5 if row.recipe is NVFP4[0] else 2**-6
    check_that_compiled_code_has_no_break(
        *row.made(), row.recipe, dynamic=dynamic, backend="aot_eager" if dynamic else "inductor",
        error=error,
    )  # fmt: skip


# Where the other operand is exact: values or numbers instead of codes, which are of one dtype.
@pytest.mark.parametrize(
    ("format", "width", "there", "absent"),
    [
        ("e4m3", 32, "quantize_values", "float8"),
        ("e4m3 1x128", 128, "quantize_dequantize", "_scaled"),
        ("nvfp4", 32, 'quantize_values(x0, "nvfp4", "bfloat16")', "uint8"),
    ],
)
def test_one_exact_operand(format: str, width: int, there: str, absent: str) -> None:
    module = tops.Sequential(tops.Linear(width, 32, bias=False), tops.GELU()).bfloat16()
    recipe = CustomRecipe(lambda role: format if role.tensor_type == "input" else None)
    x = torch.randn(16, width).bfloat16()
    text = str(on_cuda(module, x, recipe).plans()[0])
    assert there in text and absent not in text
    found, want = run_for_cuda(module, x, recipe), step(module, x, recipe)
    assert_near_in_norm(found, want)
    assert width == 32 or all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


# ---- what is said of it

EMULATED = "emulated, by products of decoded tensors"
NOTES = [
    (
        FP8[0],
        "input e4m3, weight e4m3, output gradient e5m2",
        "codes are multiplied in FP8, from compute capability 8.9 on and where sizes are multiples "
        "of 16",
    ),
    (
        BLOCKS[0],
        "input e4m3 1x128, weight e4m3 128x128, output gradient e4m3 1x128",
        "codes with a scale for each block are multiplied in FP8, with CUDA 12.9 on compute "
        "capability 9.0, and where sums are over multiples of 128, rows are multiples of 4 and "
        "columns of 16",
    ),
    (
        MX[0],
        "input mx e4m3, weight mx e4m3, output gradient mx e4m3",
        "codes of MXFP8 are multiplied, with CUDA 12.9 from compute capability 10.0 on, and where "
        "sizes are multiples of 32",
    ),
    (
        AT_RANDOM,
        "input nvfp4, weight nvfp4 16x16, output gradient nvfp4, both turned by a Hadamard "
        "transform for the weight's gradient, gradients rounded stochastically",
        "codes of NVFP4 are multiplied, with CUDA 12.9 from compute capability 10.0 on, and where "
        "sums are over multiples of 32 and columns are multiples of 16",
    ),
]


@pytest.mark.parametrize(("recipe", "formats", "codes"), NOTES)
def test_explain_says_what_is_emulated(recipe: Recipe, formats: str, codes: str) -> None:
    module, x = block(128, 256), torch.randn(32, 128).bfloat16()
    step(module, x, recipe)
    formats = f"formats of products: {formats}"
    assert module.explain().groups[0].note == f"{formats}; {EMULATED}"
    found = on_cuda(module, x, recipe).explain().groups[0].note
    assert found == f"{formats}; {codes}; all else is {EMULATED}"


def test_saved_codes_are_no_product() -> None:
    module = tops.Sequential(tops.Linear(64, 64), tops.GELU(), tops.Linear(64, 64), saved="fp8")
    module(torch.randn(4, 64).requires_grad_())
    assert "quantize(" in str(module.plans()[0])
    assert "multiplied" not in str(module.explain())


# Compute capabilities that have it, one that has not, and the rule.
CHECKS = {
    "fp8": ([(8, 9), (9, 0), (10, 0), (12, 1)], (8, 6), "at least 8.9, got 8.6"),
    "fp8_block_scaling": ([(9, 0)], (10, 0), "9.0, got 10.0"),
    "mxfp8": ([(10, 0)], (9, 0), "at least 10.0, got 9.0"),
    "nvfp4": ([(10, 0)], (9, 0), "at least 10.0, got 9.0"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_which_device_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, rule = CHECKS[name]
    is_available = getattr(tops, f"is_{name}_available")
    emulated = f"recipes are {EMULATED}"
    assert is_available("cpu") is True
    on_cpu = (True, f"on the CPU {emulated}")
    assert is_available("cpu", return_reason=True) == on_cpu
    text = "device must be CPU or CUDA, got meta"
    assert is_available("meta", return_reason=True) == (False, text)
    if not torch.cuda.is_available():
        assert is_available(return_reason=True) == on_cpu
    info = SimpleNamespace(CUDA=None)
    monkeypatch.setattr(available, "build_info", lambda: info)
    found, said = is_available("cuda", return_reason=True)
    assert not found and "must be built with TRANSFORMER_OPS_CUDA=ON" in said
    info.CUDA = {"toolkit": "13.0", "architectures": "9.0a"}
    capability = [wrong]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    text = f"compute capability must be {rule}: {emulated}"
    assert is_available("cuda", return_reason=True) == (False, text)
    for capability[0] in right:
        assert is_available("cuda:0", return_reason=True) == (True, "")
    info.CUDA = {"toolkit": "12.8", "architectures": "9.0a"}
    text = f"the CUDA toolkit must be at least 12.9, got 12.8: {emulated}"
    want = (True, "") if name == "fp8" else (False, text)
    assert is_available("cuda", return_reason=True) == want


# ---- on a GPU


@pytest.mark.cuda
@every_row
def test_a_gpu_has_the_cpus_numbers(row: Row) -> None:
    module, x = row.made()
    step(module, x, row.recipe)
    on_gpu = copy.deepcopy(module).cuda()
    want, got = step(module, x, row.recipe), step(on_gpu, x.cuda(), row.recipe)
    encodes = {"fp8": '"float8_e4m3fn"', "nvfp4": "= quantize_columns.saved("}
    kind = "fp8" if row.recipe in FP8 else "nvfp4" if row.recipe in NVFP4 else "blocks"
    assert encodes.get(kind, "= quantize(p1.weight, ") in str(on_gpu.plans()[-1])
    assert_as_exact(got, want, exact_step(module, x))


@pytest.mark.cuda
@first_rows
def test_a_captured_step(row: Row) -> None:
    # The Hadamard transform of NVFP4 too makes its constants on the device.
    module, x = row.made()
    check_a_captured_step(module.cuda(), x.cuda(), row.recipe)
