"""A compiled plan is one op for each pass, with the numbers and the saved bytes of eager mode, and
typed ops where one op would be wrong."""

import functools

import pytest
import torch
from helpers import as_tuple, assert_equal, leaf, saved_bytes
from op_cases import run_seeded
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer_ops as tops
from transformer_ops import _C, recipe
from transformer_ops._loader import build_digest
from transformer_ops.compile import groups

FORWARD, BACKWARD = "plan_forward", "plan_backward"
VIEWS = ("alias", "detach", "view")


def llama(**options):
    return tops.Residual(
        tops.RMSNorm(16), tops.Linear(16, 64, bias=False), tops.SwiGLU(), tops.Linear(32, 16),
        **options,
    )  # fmt: skip


def gelu(dropout=0.0):
    ops = [tops.LayerNorm(16), tops.Linear(16, 64), tops.GELU(), tops.Linear(64, 16)]
    return tops.Residual(*ops, tops.Dropout(dropout)) if dropout else tops.Residual(*ops)


def with_outputs():
    """Its second output is its input, and its third one is a saved tensor."""
    return tops.Sequential(
        tops.MakeExtraOutput(), tops.Linear(16, 64), tops.MakeExtraOutput(), tops.GELU(),
        tops.Linear(64, 16),
    )  # fmt: skip


def frozen():
    module = llama()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


MODULES = {
    "llama": llama,
    "gelu": gelu,
    "dropout": lambda: gelu(dropout=0.1),
    "outputs": with_outputs,
    "frozen": frozen,
    "saved in 8 bits": lambda: tops.Sequential(*llama(), saved="int8"),
}


def compiled(call, **options):
    """The compiled call, and the graphs of its passes: a list of names of ops for each."""
    graphs = []

    def note(graph, _):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([node for node in nodes if "getitem" not in str(node.target)])
        return graph.forward

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(call, fullgraph=True, backend=backend, **options), graphs


def names(graph):
    return [getattr(node.target, "_opname", str(node.target)) for node in graph]


def run(call, x, parameters):
    """Outputs, and the gradients of the input and of the parameters that want one."""
    x = leaf(x)
    outputs = as_tuple(run_seeded(call, x))
    wanted = [x, *(p for p in parameters if p.requires_grad)]
    grads = [torch.linspace(-1, 1, o.numel()).view(o.shape) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, wanted, grads)]


@pytest.mark.parametrize("name", MODULES)
def test_one_op_for_each_pass(name):
    module = MODULES[name]()
    x = torch.randn(5, 16)
    fast, graphs = compiled(module)
    assert_equal(run(fast, x, module.parameters()), run(module, x, module.parameters()))
    forward, backward = map(names, graphs)
    assert [op for op in forward if op not in VIEWS] == [FORWARD]
    # A gradient of an extra output is added to that of the op that reads it.
    assert [op for op in backward if op not in ("add", *VIEWS)] == [BACKWARD]


@pytest.mark.parametrize("name", MODULES)
def test_one_op_without_gradients(name):
    module = MODULES[name]()
    x = torch.randn(5, 16)
    fast, graphs = compiled(module)
    with torch.no_grad():
        found, wanted = run_seeded(fast, x), run_seeded(module, x)
    assert_equal(as_tuple(found), as_tuple(wanted))
    (forward,) = map(names, graphs)
    assert [op for op in forward if op not in VIEWS] == [FORWARD]


@pytest.mark.parametrize("name", ["llama", "dropout", "outputs"])
def test_inductor_calls_it_once(name):
    module = MODULES[name]()
    fast = torch.compile(module, fullgraph=True)
    for rows in (5, 7, 11):
        x = torch.randn(rows, 16)
        assert_equal(run(fast, x, module.parameters()), run(module, x, module.parameters()))


def test_sizes_stay_dynamic():
    module = llama()
    fast, graphs = compiled(module, dynamic=True)
    for rows in (5, 7, 11):
        x = torch.randn(rows, 16)
        assert_equal(run(fast, x, module.parameters()), run(module, x, module.parameters()))
    assert len(graphs) == 2 and [len(graph) for graph in graphs] == [1, 1]


@pytest.mark.parametrize("name", MODULES)
def test_saved_bytes_are_those_of_eager_mode(name):
    module = MODULES[name]()

    def saved(call):
        x = leaf(torch.randn(5, 16))
        return saved_bytes(module, x, call=lambda x: run_seeded(call, x))

    assert saved(torch.compile(module, fullgraph=True)) == saved(module)


# ---- typed ops instead


def checkpointed(module):
    return lambda x: checkpoint(module, x, use_reentrant=False)


def autocast(module):
    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    return call


BY_TYPED_OPS = {
    "checkpointed": (llama, checkpointed),
    "single op": (lambda: tops.Sequential(tops.GELU()), lambda module: module),
    "main_grad": (lambda: with_main_grad(), lambda module: module),
}


def with_main_grad():
    module = tops.Sequential(
        tops.Linear(16, 16, accumulate_into_main_grad=True), tops.GELU(), tops.Linear(16, 16)
    )
    module[0].weight.main_grad = torch.zeros(16, 16)
    return module


@pytest.mark.parametrize("name", BY_TYPED_OPS)
def test_typed_ops(name):
    make, way = BY_TYPED_OPS[name]
    module = make()
    fast, graphs = compiled(way(module))
    fast(torch.randn(5, 16, requires_grad=True)).float().sum().backward()
    found = {op for graph in graphs for op in names(graph)}
    assert found and not found & {FORWARD, BACKWARD}


def test_saved_casts():
    """Casts stay in the graph, so that the partitioner may save what was cast instead."""
    fast, graphs = compiled(autocast(llama()))
    fast(torch.randn(5, 16, requires_grad=True)).float().sum().backward()
    forward, backward = map(names, graphs)
    assert "linear" in forward and "_to_copy" in forward
    assert BACKWARD in backward and "linear_backward" not in backward


def test_large_inputs_are_released_one_by_one():
    module = tops.Sequential(tops.Linear(16, 16), tops.GELU(), tops.RMSNorm(16))
    bytes_of_a_row = 64
    most = (1 << 20) // bytes_of_a_row
    for rows, is_one_op in ((most, True), (most + 1, False)):
        fast, graphs = compiled(module, dynamic=False)
        fast(torch.randn(rows, 16, requires_grad=True)).sum().backward()
        forward, backward = map(names, graphs)
        assert (forward == [FORWARD], backward == [BACKWARD]) == (is_one_op, is_one_op)


def test_states_that_backward_updates():
    module = llama()
    with tops.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        fast, graphs = compiled(module)
        fast(torch.randn(32, 16, requires_grad=True)).sum().backward()
    assert BACKWARD not in names(graphs[1])


# ---- the ops themselves


def captured(module, x):
    """The two calls of a compiled module: their ops and the text of the plan."""
    fast, graphs = compiled(module)
    fast(leaf(x)).sum().backward()
    ((forward,), (backward,)) = graphs
    assert forward.args[0] == backward.args[0]
    return forward.target, backward.target, forward.args[0]


def test_text_needs_no_escapes():
    # Inductor's C++ wrapper puts it into source code as it is.
    _, _, text = captured(tops.Sequential(*llama(), saved="int8"), torch.randn(5, 16))
    assert text.isprintable() and not set(text) & set("\n\"\\'")


def test_random_passes_are_not_merged():
    forward, backward, _ = captured(gelu(dropout=0.1), torch.randn(5, 16))
    assert torch.Tag.nondeterministic_seeded in forward.tags
    assert torch.Tag.nondeterministic_seeded not in backward.tags
    assert torch.Tag.nondeterministic_seeded not in captured(gelu(), torch.randn(5, 16))[0].tags


def test_schemas():
    module, x = llama(), torch.randn(5, 16)
    forward, backward, text = captured(module, x)
    tensors = [x, *(p.detach() for p in module.parameters())]
    torch.library.opcheck(forward, (text, tensors), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(NotImplementedError, match=r"\[plan_forward\] tensors must not require"):
        forward(text, [leaf(x), *tensors[1:]])
    with pytest.raises(RuntimeError, match=r"\[plan_forward\] tensors must be 5 tensors, got 1"):
        forward(text, [x])
    with pytest.raises(RuntimeError, match=r"\[plan_backward\] grads must be 1 tensors, got 0"):
        backward(text, [], [])
    alone = tops.Sequential(tops.GELU())
    alone(x)
    with pytest.raises(RuntimeError, match="plan must have a pass that can run as one op"):
        forward(str(alone.plans()[0]), [x])


def test_flops():
    module, x = llama(), torch.randn(5, 16)
    totals = []
    # Torch compiles no function inside a counter.
    for call in (torch.compile(module, fullgraph=True, backend="aot_eager"), module):
        loss = call(leaf(x)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_the_functions_are_the_ops():
    module, x = llama(), torch.randn(5, 16)
    forward, _, text = captured(module, x)
    tensors = [x, *(p.detach() for p in module.parameters())]
    assert_equal(_C.plan_forward(text, tensors), forward(text, tensors))


def test_weights_in_a_frozen_region_are_not_shared_with_compiled_code():
    module, x = llama(), torch.randn(32, 16)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    region = functools.partial(tops.autocast, enabled=True, recipe=recipe.MXFP8BlockScaling())
    with torch.no_grad(), region(), tops.frozen_weights():
        found = [fast(x) for _ in range(2)]
        assert_equal(found, [module(x)] * 2)


# ---- torch's cache of compiled code


@pytest.fixture
def cache_counts(tmp_path, monkeypatch):
    """Compiles a call anew with Inductor; returns (hits, misses) of the cache on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def count(call, x):
        torch._dynamo.reset()
        counters["aot_autograd"].clear()
        torch.compile(call, fullgraph=True)(x).sum().backward()
        found = counters["aot_autograd"]
        return found["autograd_cache_hit"], found["autograd_cache_miss"]

    with (
        torch._functorch.config.patch(enable_autograd_cache=True),
        torch._inductor.config.patch(fx_graph_cache=True),
    ):
        yield count
    torch._dynamo.reset()


def test_cached_code_is_of_the_same_build(cache_counts, monkeypatch):
    module, x = llama(), torch.randn(4, 16)
    assert cache_counts(module, x) == (0, 1)
    assert cache_counts(module, x) == (1, 0)
    monkeypatch.setattr(groups, "build_digest", lambda: "another")
    assert cache_counts(module, x) == (0, 1)


def test_exported_programs_name_no_build():
    program = torch.export.export(llama(), (torch.randn(4, 16),))
    (text,) = (n.args[0] for n in program.graph.nodes if "run_plan" in str(n.target))
    assert text.startswith("plan ") and build_digest() not in text
