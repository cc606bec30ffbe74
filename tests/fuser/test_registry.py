"""The registry of fusions: handles, order, scopes, errors, and that plans never go stale."""

import sys
import threading
import types
import warnings
from typing import Any

import pytest
import torch
from user_fusions import Backward, ForwardSplit, JointSplit, assert_same, gradients, replacing

import transformer_ops as tops

BUILT_IN = ["activation_linear", "linear_bias_activation", "activation_bias"]
REGISTER = {
    "forward": tops.register_forward_fusion,
    "backward": tops.register_backward_fusion,
    "forward_backward": tops.register_forward_backward_fusion,
}


@pytest.fixture
def x():
    return torch.randn(4, 6)


@pytest.fixture
def module():
    return tops.Sequential(tops.Linear(6, 8, bias=False), tops.SiLU())


@pytest.fixture(autouse=True)
def _registry_as_it_was():
    before = tops.fusions()
    yield
    assert tops.fusions() == before


def nothing(ops, **unused):
    return ops


def names(pass_name):
    return [h.name for h in tops.fusions() if h.pass_name == pass_name and h.func is not None]


def test_the_list_names_built_in_rules():
    rows = [(h.name, h.origin, h.func) for h in tops.fusions()]
    for name in BUILT_IN:
        assert (name, "built-in", None) in rows
    (rule,) = (h for h in tops.fusions() if h.name == "activation_bias")
    assert rule.pass_name == "backward" and rule.registered and "activation_bias" in repr(rule)
    assert rule in tops.fusions()
    with pytest.raises(TypeError, match="a native rule must not be called"):
        rule([])
    with pytest.raises(TypeError, match="func must be callable, got FusionHandle"):
        tops.register_forward_fusion(rule)


@pytest.mark.parametrize("pass_name", REGISTER)
def test_a_handle(pass_name):
    handle = REGISTER[pass_name](nothing)
    assert isinstance(handle, tops.FusionHandle)
    assert (handle.name, handle.pass_name, handle.origin) == ("nothing", pass_name, __name__)
    assert handle.func is nothing and handle.registered and handle in tops.fusions()
    assert handle([1, 2]) == [1, 2] and handle.__doc__ is nothing.__doc__
    with pytest.raises(
        ValueError, match=rf"registered once in the {pass_name} pass, got 'nothing'"
    ):
        REGISTER[pass_name](nothing)
    with pytest.raises(ValueError, match="registered once"):
        REGISTER[pass_name](handle)
    handle.remove()
    assert not handle.registered and handle not in tops.fusions()
    handle.remove()
    with REGISTER[pass_name](nothing, name="again") as again:
        assert again.name == "again" and names(pass_name) == ["again"]
        handle.remove()
        assert again.registered
    assert not again.registered


def test_one_function_in_several_passes():
    with (
        tops.register_forward_fusion(nothing),
        tops.register_backward_fusion(nothing),
        tops.register_forward_backward_fusion(nothing),
    ):
        assert [h.pass_name for h in tops.fusions() if h.func is nothing] == [
            "forward_backward",
            "forward",
            "backward",
        ]


def test_a_handle_as_decorator_keeps_the_function():
    @tops.register_forward_fusion
    def decorated(ops, **unused):
        return ops

    assert decorated([3]) == [3] and decorated.__name__ == "decorated"
    decorated.remove()


def test_bound_methods_and_callable_objects():
    class Fuser:
        def fuse(self, ops, **unused):
            return ops

        def __call__(self, ops, **unused):
            return ops

    fuser = Fuser()
    with tops.register_forward_fusion(fuser.fuse), tops.register_forward_fusion(fuser) as handle:
        assert handle.name == "Fuser"
        for again in (fuser.fuse, fuser):
            with pytest.raises(ValueError, match="registered once"):
                tops.register_forward_fusion(again)
        with tops.register_forward_fusion(Fuser().fuse):
            pass


@pytest.mark.parametrize("pass_name", REGISTER)
@pytest.mark.parametrize("func", [None, 3, "fuse", [nothing]])
def test_what_cannot_be_called(func, pass_name):
    with pytest.raises(TypeError, match="func must be callable"):
        REGISTER[pass_name](func)


def test_a_name_must_be_text():
    with pytest.raises(TypeError, match="name must be a str or None, got int 3"):
        tops.register_forward_fusion(nothing, name=3)


def test_order(module, x):
    ran = []

    def make(label):
        return lambda ops, **unused: ran.append(label) or ops

    handles = [
        tops.register_forward_fusion(make("first"), name="first"),
        tops.register_forward_fusion(make("second"), name="second"),
        tops.register_forward_fusion(make("prepended"), prepend=True, name="prepended"),
        tops.register_forward_fusion(make("latest"), True, name="latest"),
    ]
    order = ["latest", "prepended", "first", "second"]
    try:
        module(x)
        assert ran == order == names("forward")
        # Users' functions run before the built-in rules of their pass.
        found = [h.name for h in tops.fusions() if h.pass_name == "forward"]
        assert found[:4] == order and "linear_bias_activation" in found[4:]
    finally:
        for handle in handles:
            handle.remove()


def test_functions_see_what_earlier_ones_did(x):
    seen = []
    module = tops.Sequential(tops.Linear(6, 8), tops.SiLU(), tops.ReLU(), tops.Linear(8, 2))
    with (
        tops.register_forward_backward_fusion(lambda ops, **_: seen.append(ops) or ops, name="a"),
        tops.register_forward_fusion(lambda ops, **_: seen.append(ops) or ops, name="b"),
        tops.register_backward_fusion(lambda ops, **_: seen.append(ops) or ops, name="c"),
    ):
        module(x)
    joint, forward, backward = seen
    kinds = [tops.BasicLinear, tops.Bias, tops.SiLU, tops.ReLU, tops.BasicLinear, tops.Bias]
    assert type(joint) is list and all(map(isinstance, joint, kinds))
    for ops in (forward, backward):
        # The built-in joint pair arrives as one fused op over the same basic ops.
        assert isinstance(ops[3], tops.FusedOperation) and len(ops) == 5
        assert all(a is b for a, b in zip(ops[3].basic_ops, joint[3:5], strict=True))


def test_each_time_the_basic_ops_again(module, x):
    calls: list[Any] = []
    with tops.register_forward_fusion(
        replacing(ForwardSplit, tops.BasicLinear, tops.SiLU, calls=calls)
    ):
        for batch in (x, x.clone().requires_grad_()):
            module(batch)
        with torch.no_grad():
            module(x)
        assert len(calls) >= 2 and all(len(ops) == 2 for ops in calls)
        count = len(calls)
        module(x)
        with torch.no_grad():
            module(x)
        assert len(calls) == count  # several plans stay cached


def test_registering_makes_cached_plans_stale(module, x):
    want = gradients(module, x)
    handle = tops.register_forward_backward_fusion(
        replacing(JointSplit, tops.BasicLinear, tops.SiLU)
    )
    assert_same(gradients(module, x), want)
    assert module.plans()[0].forward[0].name == "JointSplit"
    with handle.disabled():
        assert_same(gradients(module, x), want)
        assert [s.name for s in module.plans()[0].forward] == ["BasicLinear", "SiLU"]
        assert handle.registered
    module(x)
    assert module.plans()[0].forward[0].name == "JointSplit"
    handle.remove()
    module(x)
    assert [s.name for s in module.plans()[0].forward] == ["BasicLinear", "SiLU"]


def test_built_in_rules_can_be_disabled(x):
    module = tops.Sequential(tops.Linear(6, 8), tops.GELU())
    (rule,) = (h for h in tops.fusions() if h.name == "linear_bias_activation")
    want = gradients(module, x)
    assert [s.name for s in module.plans()[0].forward] == ["linear_bias_activation"]
    with rule.disabled(), rule.disabled():
        assert_same(gradients(module, x), want)
        assert "linear_bias_activation" not in [s.name for s in module.plans()[0].forward]
        assert rule in tops.fusions()
    module(x)
    assert [s.name for s in module.plans()[0].forward] == ["linear_bias_activation"]


def wrong_lists():
    def reorder(ops, **unused):
        return ops[::-1]

    def drop(ops, **unused):
        return ops[1:]

    def repeat(ops, **unused):
        return [*ops, ops[-1]]

    def foreign(ops, **unused):
        return [ops[0], tops.SiLU()]

    def plain_modules(ops, **unused):
        return [ops[0], torch.nn.SiLU()]

    def container(ops, **unused):
        return [tops.Sequential(*ops)]

    def half(ops, **unused):
        return [ForwardSplit([ops[0], tops.SiLU()])]

    def numbers(ops, **unused):
        return [1 for _ in ops]

    must = "must return exactly the given basic ops in order, got "
    given = r"\(ops: \[BasicLinear, SiLU\]\)"
    return [
        (reorder, must + r"\[SiLU, BasicLinear\] " + given),
        (drop, must + r"\[SiLU\] " + given),
        (repeat, must + r"\[BasicLinear, SiLU, SiLU\]"),
        (foreign, must + r"\[BasicLinear, SiLU\]"),
        (plain_modules, must + r"\[BasicLinear, SiLU\]"),
        (container, must + r"\[Sequential\]"),
        (half, must + r"\[ForwardSplit\(BasicLinear, SiLU\)\]"),
        (numbers, must + r"\["),
    ]


@pytest.mark.parametrize("pass_name", REGISTER)
@pytest.mark.parametrize(("func", "message"), wrong_lists())
def test_a_wrong_list_fails_the_call_and_changes_nothing(pass_name, func, message, module, x):
    want, random = gradients(module, x), torch.get_rng_state()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    message = rf"\[{func.__name__}\] a {pass_name} fusion {message}"
    with REGISTER[pass_name](func):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                module(x)
        with pytest.raises(RuntimeError, match=rf"\[{func.__name__}\]"):
            torch.compile(module, backend="aot_eager")(x)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(gradients(module, x), want)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("pass_name", REGISTER)
@pytest.mark.parametrize("returned", [None, 3, "ops", torch.ones(2)])
def test_a_wrong_type(returned, pass_name, module, x):
    message = rf"\[wrong\] a {pass_name} fusion must return a list.*\[BasicLinear, SiLU\]"
    with REGISTER[pass_name](lambda ops, **_: returned, name="wrong"):
        for call in (module, torch.compile(module, backend="eager")):
            with pytest.raises(RuntimeError, match=message):
                call(x)
    module(x)


def test_a_tuple_will_do(module, x):
    with tops.register_forward_fusion(lambda ops, **_: tuple(ops), name="tuple"):
        module(x)


@pytest.mark.parametrize("pass_name", REGISTER)
@pytest.mark.parametrize("error", [KeyError("boom"), RuntimeError("boom"), StopIteration("boom")])
def test_a_function_that_raises(error, pass_name, module, x):
    want = gradients(module, x)

    def raises(ops, **unused):
        raise error

    message = rf"\[raises\] a {pass_name} fusion must not raise, got {type(error).__name__}: .*boom"
    with REGISTER[pass_name](raises):
        with pytest.raises(RuntimeError, match=message + r".*\[BasicLinear, SiLU\]") as caught:
            module(x)
        assert caught.value.__cause__ is error
        with pytest.raises(Exception, match="boom"):
            torch.compile(module, backend="eager")(x)
    assert_same(gradients(module, x), want)


def test_a_function_that_takes_no_keywords(module, x):
    with tops.register_forward_fusion(lambda ops: ops, name="old"):
        with pytest.raises(RuntimeError, match=r"\[old\] .* got TypeError: .*recipe"):
            module(x)


@pytest.mark.parametrize(
    ("pass_name", "fused", "missing"),
    [
        ("forward", Backward, "a forward"),
        ("backward", ForwardSplit, "fuser_backward"),
        ("forward_backward", ForwardSplit, "fuser_backward"),
        ("forward_backward", Backward, "a forward"),
    ],
)
def test_a_fused_op_without_the_direction(pass_name, fused, missing, module, x):
    func = replacing(fused, tops.BasicLinear, tops.SiLU)
    message = rf"a fused op of the {pass_name} pass must define {missing}, got {fused.__name__}"
    with REGISTER[pass_name](func):
        with pytest.raises(RuntimeError, match=message):
            module(x)
    module(x)


def test_a_joint_fused_op_must_stay(module, x):
    with (
        tops.register_forward_backward_fusion(replacing(JointSplit, tops.BasicLinear, tops.SiLU)),
        tops.register_forward_fusion(
            lambda ops, **_: [ForwardSplit(ops[0].basic_ops)], name="greedy"
        ),
    ):
        with pytest.raises(RuntimeError, match=r"\[greedy\] a forward fusion must keep joint"):
            module(x)
    module(x)


def test_a_function_that_changes_its_list_or_the_registry(module, x):
    def clears(ops, **unused):
        kept = list(ops)
        ops.clear()
        return kept

    def removes_itself(ops, **unused):
        handle.remove()
        return ops

    with tops.register_forward_fusion(clears):
        module(x)
    handle = tops.register_forward_fusion(removes_itself)
    module(x)
    assert not handle.registered
    module(x)


def test_many_threads_register_and_run(x):
    module = tops.Sequential(tops.Linear(6, 8, bias=False), tops.SiLU())
    want = module(x).detach()
    failures = []

    def run(k):
        try:
            for _ in range(10):
                with tops.register_forward_fusion(
                    replacing(ForwardSplit, tops.BasicLinear, tops.SiLU), name=f"thread {k}"
                ):
                    torch.testing.assert_close(module(x), want)
                torch.testing.assert_close(module(x), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _run_cell(module, source):
    exec(compile(source, "cell", "exec"), vars(module))
    return module.handle


CELLS = {
    "class": """
import transformer_ops as tops
class Fused(tops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return input_ + 1, [(), ()]
handle = tops.register_forward_fusion(Fused, pattern=[tops.SiLU, tops.ConstantScale])
""",
    "function": """
import transformer_ops as tops
@tops.register_forward_fusion
def handle(ops, **unused):
    return ops
""",
}


@pytest.mark.parametrize("name", CELLS)
def test_what_is_defined_again_replaces_the_old_one(name, monkeypatch):
    notebook = types.ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", notebook)
    first = _run_cell(notebook, CELLS[name])
    message = rf"\[fusion\] '{first.name}' in the forward pass is replaced, because a_notebook\."
    with pytest.warns(UserWarning, match=message):
        second = _run_cell(notebook, CELLS[name])
    with second:
        assert not first.registered and names("forward") == [second.name]
        # A namesake that lives elsewhere is another fusion.
        other = types.ModuleType("another_notebook")
        monkeypatch.setitem(sys.modules, "another_notebook", other)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with _run_cell(other, CELLS[name]):
                assert second.registered
