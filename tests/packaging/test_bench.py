"""The benchmark tool: its statistics, its counters, its check, and a tiny run of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench
import blocks
import call_cost
import overlap
import products
import profile_block
import startup
import weight_scales
from suite import cases, check, guards, measure, pages, peak, plots, rows, tables, targets, timing
from suite.cases import BLOCK_SIZE, COMPILED, EAGER, FORWARD, OP_SIZE, OURS, TRAINING
from suite.results import SECOND, Results
from ways import NoWork

pytestmark = pytest.mark.takes(seconds=40)

CPU = torch.device("cpu")
ABOUT = {
    "cpu": "a CPU", "cores": 2, "features": ["AVX2"], "threads": 2, "torch": "2.15.0",
    "environment": {}, "date": "2026-01-01", "commit": "abc",
}  # fmt: skip


def row(
    name: str = "gelu", size: tuple[int, ...] = OP_SIZE, allocator: str = "default", **times: float
) -> dict[str, Any]:
    """A line of a worker: three rounds of each way, the same times in both passes."""
    ms = {way: [t, 1.1 * t, 0.9 * t] for way, t in times.items()}
    case = cases.Case(name, "fp32", size, allocator)
    saved = {way: 100 for way in times if way in cases.WAYS}
    return {"case": case.as_json(), "ms": {FORWARD: ms, TRAINING: dict(ms)}, "saved": saved}


def results(*rows: dict[str, Any]) -> Results:
    found = Results(dict(ABOUT))
    for line in rows:
        found.add(line)
    return found


# ---- time


class FakeClock:
    """Every call takes the seconds that it returns."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def seconds(self, call: timing.Call, count: int) -> float:
        spent: Any = call()
        self.asked.append((spent, count))
        return spent


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(0, timing.LEAST_ROUNDS), (0.13, 10), (99, timing.MOST_ROUNDS)]
)
def test_rounds_fit_the_time_given(seconds: float, rounds: int) -> None:
    clock = FakeClock()
    calls = {"slow": lambda: 0.01, "fast": lambda: 0.0005}
    times = timing.interleave(calls, seconds, clock)  # type: ignore[arg-type]
    assert times == {"slow": [10.0] * rounds, "fast": [0.5] * rounds}
    # Short calls are repeated, so that a sample is long enough for the clock.
    measured = clock.asked[-2 * rounds :]
    assert set(measured) == {(0.01, 1), (0.0005, 4)}
    # Each way is once a round, and begins some of them.
    assert len(set(measured[::2])) == 2
    for first, second in zip(measured[::2], measured[1::2], strict=True):
        assert first != second


def test_ratio_is_the_median_of_rounds_not_the_ratio_of_medians() -> None:
    # A slow round slows both; a disturbed sample is one round of many.
    assert timing.ratio([1, 10, 3, 100, 2], [2, 20, 6, 2, 4]) == 0.5


def test_a_clock_measures_a_call() -> None:
    called = []
    assert timing.Clock(CPU).seconds(lambda: called.append(1), 3) > 0
    assert len(called) == 3


# ---- saved bytes and bounds


def test_saved_bytes_count_each_storage_once_and_whole_without_parameters() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    linear = nn.Linear(8, 3)
    assert measure.saved_bytes(linear, [x], linear.parameters()) == 4 * 4 * 8
    assert measure.saved_bytes(linear, [x], []) == 4 * (4 * 8 + 8 * 3)
    assert measure.saved_bytes(lambda t: t[:1] * t[1:2], [x], []) == 4 * 4 * 8
    assert measure.saved_bytes(lambda t: t.sin().cos(), [x], []) == 2 * 4 * 4 * 8
    assert measure.saved_bytes(lambda t: t + 1, [x], []) == 0


@pytest.mark.parametrize("way", [EAGER, OURS])
def test_saved_bytes_of_a_block_are_those_of_the_baselines(way: str) -> None:
    # baselines.md: 11.0 sizes of the input for eager GELU at f = 4h, and never more for ours.
    case = cases.Case("GELU block", "fp32", (64, 256, 1024), "default", (way,))
    inputs = measure.prepare(case, CPU)
    call, parameters = measure.make_way(case, way, CPU)
    kept = measure.saved_bytes(call, inputs, parameters) / tables.input_bytes(case)
    assert round(kept, 1) == 11.0 if way == EAGER else 3 < kept < 11.0


class Products(TorchDispatchMode):
    """Notes the sizes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.seen.append((*a.shape, b.shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", cases.BLOCKS)
@pytest.mark.parametrize("pass_name", cases.PASSES)
def test_the_floor_is_the_products_of_the_block(name: str, pass_name: str) -> None:
    case = cases.Case(name, "fp32", (6, 8, 16), "default")
    inputs = measure.prepare(case, CPU)
    call, parameters = measure.make_way(case, EAGER, CPU)
    forward, training = measure.make_calls(call, inputs, parameters)
    (floor,) = measure.bound(case, pass_name, inputs[0].detach(), CPU).values()
    with Products() as real:
        forward() if pass_name == FORWARD else training()
    with Products() as alone:
        floor()
    # A weight's gradient may be computed transposed: the same product.
    assert sorted(map(sorted, alone.seen)) == sorted(map(sorted, real.seen))
    assert len(alone.seen) == (2 if pass_name == FORWARD else 6)


def test_roof_counts_bytes_in_copies_of_the_input() -> None:
    # 5 sizes for GELU, of which a copy moves 2: roof = 2.5 copies.
    found = results(row(ours=5.0, copy=1.0)).rows[0]
    assert found.bound() == 2.5
    assert found.to_bound(OURS) == 2.0
    assert found.bound(FORWARD) == 1.0


# ---- calls


def test_the_table_of_calls_has_guards_where_they_were_counted() -> None:
    times = {name: {"us": 10.0, "ratio": 0.5} for name in call_cost.PASSES}
    way = {"way": "ours, compiled", **times}
    counted = {"guards": 128, "guards us": 3.21}
    calls = {"blocks": {"a": [{"way": "eager", **times}, {**way, **counted}], "b": [way]}}
    found = Results(dict(ABOUT), calls=calls)
    table = tables.calls(found, "a")
    assert table.headers == ["a", *call_cost.PASSES, "guards"]
    assert [line[-1] for line in table.rows] == ["-", "128 (3.2)"]
    assert tables.calls(found, "b").headers == ["b", *call_cost.PASSES]


def test_guards_grow_with_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    one, three = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(*(nn.Linear(4, 4) for _ in "abc"))
    few, many = (guards.look_at_guards(module, x) for module in (one, three))
    assert 0 < few.lines < many.lines
    assert 0 < few.checks < many.checks
    assert few.us > 0

    def repeat(check: Any, number: int, repeat: int) -> list[float]:
        assert check() is True
        return [number * 3e-6, number * 2e-6, number * 4e-6]

    monkeypatch.setattr(guards.timeit, "repeat", repeat)
    torch._dynamo.reset()
    assert guards.look_at_guards(one, x) == (few.lines, few.checks, pytest.approx(2.0))


@pytest.mark.parametrize("block", blocks.BLOCKS, ids=lambda block: block.name)
def test_a_graph_without_work_has_the_gradients_of_the_block(block: blocks.Block) -> None:
    """Else it would be no bound of what compiled calls cost."""
    plain = block.eager(8, 16)
    module, x = NoWork(plain), torch.randn(4, 8, requires_grad=True)
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([str(node.target) for node in found])
        return make_boxed_func(graph.forward)

    call = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    wanted = [x, *module.parameters()]
    found = torch.autograd.grad(call(x).sum(), wanted)
    assert [g.shape for g in found] == [t.shape for t in [x, *plain.parameters()]]
    assert graphs == [["aten.empty_like.default"], []]


# ---- peak memory


def test_high_water_sees_memory_that_is_gone_again() -> None:
    before = peak.mark(CPU)
    torch.ones(16 << 20).sum().item()
    grown = peak.high_water(CPU) - before
    # The kernel counts in batches of some pages.
    assert 63 << 20 < grown < 80 << 20
    before = peak.mark(CPU)
    assert peak.high_water(CPU) - before < 16 << 20


def test_peak_of_a_stack_holds_what_it_saves_and_its_gradients() -> None:
    size = (2048, 64, 256)
    case = cases.Case("GELU block", "fp32", size, "default", (EAGER,))
    inputs = measure.prepare(case, CPU)
    call, parameters = measure.make_way(case, EAGER, CPU)
    kept = cases.STACK * measure.saved_bytes(call, inputs, parameters)
    found = peak.peak_bytes("GELU block", "fp32", size, EAGER, "cpu")
    assert 0.9 * kept < found < 2.5 * kept


# ---- targets


def test_best_is_the_faster_reference_and_needs_both() -> None:
    found = results(row(eager=8.0, compiled=4.0, ours=2.0)).rows[0]
    assert found.to_best(OURS) == 0.5
    assert results(row(eager=8.0, ours=2.0)).rows[0].to_best(OURS) is None


def test_outcomes() -> None:
    found = results(
        row("gelu", eager=8.0, compiled=4.0, ours=2.0),
        row("silu", eager=8.0, compiled=4.0, ours=1.0),
        row("relu", eager=8.0, compiled=4.0, ours=1.804),
        row("silu", (64, 2048), eager=8.0, compiled=4.0, ours=3.0),
        row("silu", OP_SIZE, "warm", eager=8.0, compiled=4.0, ours=5.0, copy=1.0),
    )
    found.peaks = {
        cases.Stack("GELU block", "bf16", BLOCK_SIZE, way).id: mb
        for way, mb in ((EAGER, 100), (COMPILED, 80), (OURS, 40))
    }
    said = {line[0]: line[1:] for line in tables.targets(found).rows}
    best = "best of eager and Inductor"
    assert said["gelu"] == [best, "0.45", "0.50 NO", "-", "-"]
    assert said["relu"] == [best, "0.45", "0.451 NO", "-", "-"]
    assert said["silu"] == [best, "0.45", "0.25 ok", "-", "0.75 (fp32 64x2048)"]
    assert said["silu, warm allocator"] == ["roof", "1.50", "2.00 NO", "-", "-"]
    assert said["GELU block"] == [best, "0.93 / 0.85", "-", "-", "-"]
    assert said["GELU block x 6, peak memory"] == [best, "0.60", "-", "0.50 ok", "-"]


def test_every_op_and_block_has_its_targets_and_its_cases() -> None:
    assert list(targets.OP_LIMITS) == list(cases.OPS)
    assert list(targets.BLOCK_LIMITS) == list(targets.PEAK_LIMITS) == list(cases.BLOCKS)
    ids = [case.id for case in cases.timed_cases(quick=False)]
    assert len(ids) == len(set(ids))
    for case in cases.timed_cases(quick=True):
        # Else CI would have nothing recorded to compare to.
        assert case.id in ids
    for target in targets.TARGETS:
        for size in (target.size, *target.others):
            assert any("x".join(map(str, size)) in name for name in ids)


# ---- the check


def test_check_compares_ratios_not_times() -> None:
    recorded = results(row(eager=8.0, ours=4.0))
    slow_machine = results(row(eager=80.0, ours=40.0))
    assert check.compare(slow_machine, recorded) == ([], 3)
    assert check.compare(results(row(eager=8.0, ours=5.9)), recorded) == ([], 3)
    worse, compared = check.compare(results(row(eager=8.0, ours=6.1)), recorded)
    assert compared == 3
    assert [w.what for w in worse] == [f"{name}, ours / eager" for name in cases.PASSES]
    assert str(worse[0]) == (
        "[bench] gelu/fp32/8192x2048/default, forward, ours / eager: must be at most 1.5 times the "
        "recorded 0.500, got 0.762"
    )
    assert check.compare(results(row("silu", eager=8.0, ours=50.0)), recorded) == ([], 0)


@pytest.mark.parametrize(
    "about",
    [{"features": ["AVX-512", "AVX2"]}, {"cpu": "another CPU"}],
    ids=lambda row: next(iter(row)),
)
def test_another_processor_widens_the_limit_of_times_alone(about: dict[str, Any]) -> None:
    recorded = results(row(eager=8.0, ours=4.0))
    recorded.about |= about
    slower, grown = row(eager=8.0, ours=15.9), row(eager=8.0, ours=16.1)
    grown["saved"]["ours"] = 151
    for one in (found := [results(slower), results(grown)]):
        one.about["features"] = ["AVX2"]
    assert check.compare(found[0], recorded) == ([], 3)
    worse, _ = check.compare(found[1], recorded)
    assert [w.limit for w in worse] == [4.0, 4.0, 1.5]
    assert worse[-1].what == "saved bytes, ours / eager"


# ---- files


def test_json_goes_both_ways(tmp_path: Path) -> None:
    found = results(row(eager=8.0, compiled=4.0, ours=2.0, copy=1.0))
    path = tmp_path / "bench.json"
    path.write_text(found.text())
    assert json.loads(found.text())["rows"][0]["ratios"][TRAINING]["ours / eager"] == [0.25] * 3
    assert tables.everything(Results.read(path)) == tables.everything(found)
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match=r"\[bench\] .* must be of format 1, got 99"):
        Results.read(path)


def test_a_page_takes_tables_between_its_marks() -> None:
    text = "a\n<!-- bench ops -->\nold\n<!-- /bench -->\nb\n<!-- bench peaks -->\n<!-- /bench -->\n"
    made = pages.rendered(text, results(row(eager=8.0, compiled=4.0, ours=2.0, copy=1.0)))
    assert "old" not in made
    assert "| gelu | fp32 | 8.00 / 8.00 | 4.00 / 4.00 | 2.00 / 2.00 |" in made
    assert pages.UNKNOWN in made
    assert made.startswith("a\n<!-- bench ops -->\n|")
    assert made.endswith("<!-- /bench -->\n")


PAGES = (pages.PAGE, pages.SUMMARY, pages.README, pages.MODELS)


def test_every_part_of_the_record_has_its_place() -> None:
    texts = (page.read_text(encoding="utf-8") for page in PAGES)
    shown = [found[2] for text in texts for found in pages.MARKED.finditer(text)]
    assert sorted(shown) == sorted(pages.PARTS)
    assert set(bench.LIMITED) <= set(shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_shows_what_is_recorded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [found[2] for found in pages.MARKED.finditer(text)]
    assert pages.rendered(text, Results.read(bench.RECORDED)) == text


def test_three_numbers_of_the_models() -> None:
    found = Results.read(bench.RECORDED)
    rows = [("m, float32: saved for backward", "eager", 0.6), ("m, float32: step", "eager", 0.9)]
    rows += [("n, float32: saved for backward", "eager", 0.7), ("n, float32: step", "eager", 0.8)]
    rows += [("n, bfloat16: step", "eager", 0.1), ("n, float32: step", "Inductor", 0.1)]
    rows += [("n, float32: seconds of fuse", "1 s", 0.21)]
    about = found.limited["models"]["about"]
    made = [{"what": what, "against": against, "found": ratio} for what, against, ratio in rows]
    found.limited["models"] = {"about": about, "rows": made}
    text = pages.rendered("<!-- bench in short -->\n<!-- /bench -->", found)
    assert "**30 to 40 % fewer bytes**" in text
    assert "**10 to 20 % less time**" in text
    assert "**0.2 s** to fuse" in text


def test_models_that_recompute_products_in_short() -> None:
    found = Results.read(bench.RECORDED)
    what = f"float32, {cases.PRODUCTS}"
    rows = [(f"m, {what}: saved for backward", 0.2), (f"m, {what}: step", 0.9)]
    rows += [(f"n, {what}: saved for backward", 0.3), (f"n, {what}: step", 1.1)]
    rows += [("n, float32: step", 0.1), ("n, bfloat16, products recomputed: step", 0.1)]
    about = found.limited["models"]["about"]
    made = [{"what": name, "against": "eager", "found": ratio} for name, ratio in rows]
    found.limited["models"] = {"about": about, "rows": made}
    text = pages.rendered("<!-- bench products in short -->\n<!-- /bench -->", found)
    assert "**70 to\n80 % fewer bytes**" in text
    assert "0.90 to 1.10 of its time" in text


def test_only_chooses_by_name() -> None:
    ids = [case.id for case in cases.timed_cases(quick=False)]
    assert cases.selected(ids, []) == set(ids)
    assert cases.selected(ids, ["gelu/bf16/8*warm"]) == {"gelu/bf16/8192x2048/warm"}
    assert len(cases.selected(ids, ["GELU block", "Llama"])) > 20


# ---- all of it


def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "QUICK_OP_SIZE", (8, 16))
    run = ["--quick", "--only", "relu/fp32", "--only", "dropout/bf16", "--seconds", "0.01"]
    run += ["--out", str(tmp_path)]
    assert bench.main(run) == 0
    shown = capfd.readouterr().out
    assert "relu/fp32/8x16/warm" in shown
    found = Results.read(tmp_path / "bench.json")
    assert sorted(r.case.id for r in found.rows) == [
        "dropout/bf16/8x16/warm",
        "relu/fp32/8x16/warm",
    ]
    for line in found.rows:
        assert set(line.ms[TRAINING]) == {EAGER, OURS, measure.COPY}
        assert all(t > 0 for times in line.ms[TRAINING].values() for t in times)
    relu = next(r for r in found.rows if r.case.name == "relu")
    assert relu.saved == {EAGER: 4 * 8 * 16, OURS: 8 * 16 // 8}

    # The same run against what it recorded, made 100 times as good: it fails, having tried twice.
    given = json.loads((tmp_path / "bench.json").read_text())
    for line in given["rows"]:
        for ways in line["ms"].values():
            ways[OURS] = [t / 100 for t in ways[OURS]]
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(given))
    assert bench.main([*run, "--check", "--recorded", str(recorded)]) == 1
    said = capfd.readouterr().err
    assert "measuring 2 again" in said
    assert "[bench] relu/fp32/8x16/warm, forward, ours / eager: must be at most" in said


def test_a_case_that_fails_is_reported_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = cases.Case("GELU block", "fp32", (8, 16), "default", (EAGER,), 0.01)
    good = cases.Case("silu", "fp32", (8, 16), "default", (EAGER, OURS), 0.01)
    monkeypatch.setattr(cases, "timed_cases", lambda quick, cuda=False: [broken, good])
    monkeypatch.setattr(cases, "stacks", lambda quick: [])
    assert bench.main(["--only", "8x16", "--out", str(tmp_path)]) == 1
    said = capfd.readouterr()
    assert "[bench] GELU block/fp32/8x16/default: TypeError" in said.err
    assert "silu/fp32/8x16/default" in said.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ways", "eager,best"], "--ways must be among eager, compiled, ours, ours compiled"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--check", "--recorded", "none.json"], "--recorded must be a file, got none.json"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert text in capsys.readouterr().err


def test_a_pattern_that_matches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", "softmax"]) == 2
    assert "--only must match a case, got ['softmax']" in capsys.readouterr().err


def test_a_part_of_the_record_replaces_that_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, page = tmp_path / "recorded.json", tmp_path / "measurements.md"
    recorded.write_text(bench.RECORDED.read_text(encoding="utf-8"))
    page.write_text(pages.PAGE.read_text(encoding="utf-8"))
    for module in (bench, rows):
        monkeypatch.setattr(module, "RECORDED", recorded)
    monkeypatch.setattr(pages, "PAGE", page)
    for name in ("README", "SUMMARY", "MODELS"):
        monkeypatch.setattr(pages, name, page)
    before = Results.read(recorded)
    calls = {**(before.calls or {}), "about": {**ABOUT, "cpu": "a new CPU"}, bench.WORSE: []}
    monkeypatch.setattr(bench, "run_program", lambda *unused: (dict(calls), 0))
    assert bench.main(["--only", "calls", "--record", "--out", str(tmp_path)]) == 0
    after = Results.read(recorded)
    assert after.calls is not None and after.calls["about"]["cpu"] == "a new CPU"
    assert len(after.rows) == len(before.rows) > 0
    assert (after.peaks, after.limited, after.about) == (before.peaks, before.limited, before.about)
    assert "a new CPU" in page.read_text(encoding="utf-8")
    text = recorded.read_text()
    assert bench.main(["--only", "gelu", "--record"]) == 2
    assert "[bench] --only must name programs alone (" in capsys.readouterr().err
    assert recorded.read_text() == text


# ---- the tools beside it


def test_the_profile_of_a_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_block, "ROUNDS", 1)
    threads = str(torch.get_num_threads())
    options = ["GELU block", "--size", "8", "16", "32", "--ways", EAGER, OURS, "--threads", threads]
    monkeypatch.setattr(sys, "argv", ["profile_block.py", *options])
    profile_block.main()
    eager, ours = capsys.readouterr().out.split("ours: ")
    assert "aten::addmm" in eager
    assert "transformer_ops" not in eager
    assert "transformer_ops::linear_activation_backward" in ours


def test_imports_are_timed_in_one_process_and_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch, of_ours = startup.round_of(dict(os.environ))
    assert 0 < of_ours < of_torch
    times = {startup.TORCH: [1000.0, 2000.0, 900.0], startup.OURS: [100.0, 180.0, 900.0]}
    monkeypatch.setattr(startup, "measure", lambda rounds: times)
    monkeypatch.setattr(startup, "LONG", 2 * startup.SHORT)
    imported, planned = startup.rows(quick=True)
    assert (imported.limit, imported.found) == (0.15, 0.1)
    assert planned.limit == 1.3 and planned.found > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["forward", "grad_input", "grad_weight"])
def test_a_product_in_both_ways(
    which: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SECONDS", 0.0)
    # Large enough for oneDNN.
    x, weight, grad = (torch.randn(rows, 512).to(dtype) for rows in (64, 512, 64))
    row = products.measure(which, x, weight, grad)
    assert torch.backends.mkldnn.enabled
    ours, theirs, ratio, *errors = (float(word) for word in row.split())
    assert min(ours, theirs, ratio) > 0
    least, most = (1e-9, 1e-6) if dtype == torch.float32 else (1e-4, 1e-2)
    assert least < min(errors) <= max(errors) < most


def test_weights_are_trained_by_each_scale() -> None:
    """A step leaves about eight bits per byte. The first delayed scale, 1, loses small numbers."""
    found = [weight_scales.bits_per_byte(way, 0, 1, masters=True) for way in weight_scales.FORMATS]
    assert max(found) - min(found) < 0.5 and 7 < min(found) < 9
    assert (
        weight_scales.QuantizedTensor._take.__module__
        == "transformer_ops.quantization.quantized_tensor"
    )


def test_overlap_measures_each_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """Small sizes say nothing about time; what runs beside products has the numbers of the rest."""
    assert overlap.main(["--quick"]) == 0
    rules = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rules == [
        ["gather_linear", "forward"],
        ["linear_scatter", "forward"],
        ["gather_linear", "backward"],
        ["linear_scatter", "backward"],
        ["reduce_gradient_linear", "backward"],
    ]


def test_pictures_are_short_and_keep_what_they_refer_to(tmp_path: Path) -> None:
    recorded = Path(bench.__file__).parent / "recorded.json"
    paths = plots.draw_all(Results.read(recorded), tmp_path)
    assert len(paths) == len(plots.PICTURES)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 300, path.name
        referred = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
        names = {name for pair in referred for name in pair if name}
        assert names and names <= set(re.findall(r' id="([^"]+)"', text)), path.name


# ---- rows with limits


def limited(*found: float) -> list[rows.Row]:
    """Rows of limit 1, named by their position."""
    return [rows.Row(f"row {i}", "eager", 1.0, value, "", "") for i, value in enumerate(found)]


@pytest.mark.parametrize(
    ("second", "status", "kept"), [((3.0, 1.0), 0, [1.2, 1.0]), ((0.5, 2.5), 1, [0.5, 2.5])]
)
def test_a_row_beyond_its_limit_is_measured_again(
    second: tuple[float, ...],
    status: int,
    kept: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "rows.json"
    threads = str(torch.get_num_threads())
    arguments = ["rows", "--check", "--quick", "--out", str(out), "--threads", threads]
    monkeypatch.setattr(sys, "argv", arguments)
    turns = iter([limited(1.2, 3.0), limited(*second)])
    assert rows.run("rows", "", lambda quick: next(turns)) == status
    content = json.loads(out.read_text(encoding="utf-8"))
    assert [row["found"] for row in content["rows"]] == kept
    assert len(content[rows.WORSE]) == status


def test_a_time_by_itself_fails_no_check() -> None:
    (row,) = limited(9.0)
    assert rows.too_high([row], 1.5) == [row]
    assert not rows.too_high([row._replace(against=SECOND)], 1.5)


def test_every_program_starts_by_itself() -> None:
    # As `python benchmarks/NAME.py` does, with none of the others' modules loaded before.
    starts = (
        "import os, pathlib, runpy, peft, timm, transformer_ops\n"
        "for path in sorted(pathlib.Path.cwd().glob('*.py')):\n"
        "    if (child := os.fork()) == 0:\n"
        "        runpy.run_path(str(path), run_name='imported')\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, path.name\n"
    )
    folder = Path(bench.__file__).parent
    subprocess.run([sys.executable, "-c", starts], check=True, cwd=folder)
