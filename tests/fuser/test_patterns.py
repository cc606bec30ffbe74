"""Users' fused ops that say by a pattern where they apply."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from user_fusions import rows, silu_gradient

import transformer_ops as tops
from transformer_ops.testing import check_fusion


class Epilogue(tops.FusedOperation):
    """BasicLinear, an optional Bias, SiLU or ReLU; backward computes the product again."""

    def tensors(self) -> tuple[Tensor, ...]:
        first, *more, _ = self.basic_ops
        return first.weight, *(op.bias for op in more)

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        hidden = linear(input_, *self.tensors())
        is_silu = isinstance(self.basic_ops[-1], tops.SiLU)
        output = torch.nn.functional.silu(hidden) if is_silu else hidden.relu()
        return output, [()] * len(self.basic_ops), (input_, *self.tensors())

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        x, weight, *bias = basic_op_ctxs[0].saved_tensors
        hidden = linear(x, weight, *bias)
        is_silu = isinstance(self.basic_ops[-1], tops.SiLU)
        grad = silu_gradient(grad_output, hidden) if is_silu else grad_output * (hidden > 0)
        grads: list[Any] = [(rows(grad).T @ rows(x),)]
        if len(self.basic_ops) == 3:
            grads.append((rows(grad).sum(0),))
        grads.append(())
        return grad @ weight, grads, [()] * len(self.basic_ops)


class Forward(tops.FusedOperation):
    fuser_forward_compute = Epilogue.fuser_forward_compute
    fuser_forward_save_ctx = Epilogue.fuser_forward_save_ctx


PATTERN = [tops.BasicLinear, tops.optional(tops.Bias), (tops.SiLU, tops.ReLU)]


def mlp(bias: bool = True, activation: type = tops.SiLU) -> list[Any]:
    return [tops.Linear(6, 8, bias=bias), activation(), tops.Linear(8, 6)]


def joint(*entries: Any, **keywords: Any) -> tops.FusionHandle:
    return tops.register_forward_backward_fusion(Epilogue, pattern=entries or PATTERN, **keywords)


def steps(ops: list[Any], x: Tensor | None = None) -> list[tuple[str, tuple[int, ...]]]:
    module = tops.Sequential(*ops)
    module(torch.randn(3, 6, requires_grad=True) if x is None else x).sum().backward()
    return [(step.name, step.ops) for step in module.plans()[0].forward]


def misses(ops: list[Any], fusion: str = "Epilogue") -> list[tuple[tuple[int, ...], str]]:
    module = tops.Sequential(*ops)
    module(torch.randn(3, 6))
    found = module.plans()[0].near_misses
    return [(miss.ops, miss.reason) for miss in found if miss.fusion == fusion]


# ---- matching


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [tops.SiLU, tops.ReLU])
def test_numbers(bias: bool, activation: type) -> None:
    check_fusion(
        Epilogue,
        lambda: mlp(bias, activation),
        torch.randn(3, 6),
        kind="forward_backward",
        pattern=PATTERN,
    )


def test_check_fusion_takes_a_handle() -> None:
    with joint() as handle:
        check_fusion(handle, mlp, torch.randn(3, 6))
    with joint(guard=lambda ops: "not here") as handle:
        with pytest.raises(AssertionError, match="Epilogue"):
            check_fusion(handle, mlp, torch.randn(3, 6), kind="forward_backward")


def test_check_fusion_tells_what_the_guard_said() -> None:
    with pytest.raises(AssertionError, match=r"must fire in forward, .*; at \[0, 1, 2\]: too hot"):
        check_fusion(
            Epilogue,
            mlp,
            torch.randn(3, 6),
            kind="forward_backward",
            pattern=PATTERN,
            guard=lambda ops: "too hot",
        )


def test_what_check_fusion_refuses() -> None:
    x = torch.randn(3, 6)
    with pytest.raises(TypeError, match=r"\[fusion\] a fused op must have a pattern, got"):
        check_fusion(Epilogue, mlp, x, kind="forward_backward")
    with joint() as handle, pytest.raises(TypeError, match="must be left to the handle"):
        check_fusion(handle, mlp, x, pattern=[tops.SiLU])


def test_an_optional_entry_and_alternatives() -> None:
    with joint():
        assert steps(mlp())[0] == ("Epilogue", (0, 1, 2))
        assert steps(mlp(bias=False))[0] == ("Epilogue", (0, 1))
        assert steps(mlp(activation=tops.ReLU))[0] == ("Epilogue", (0, 1, 2))
        assert "Epilogue" not in dict(steps(mlp(activation=tops.GELU)))


def test_an_optional_entry_at_the_end_is_taken_where_it_is_there() -> None:
    class Scaled(tops.FusedOperation):
        def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
            scale = self.basic_ops[1].scale if len(self.basic_ops) > 1 else 1.0
            hidden = torch.sigmoid(input_) * input_
            return hidden * scale, [()] * len(self.basic_ops), (input_,)

        def fuser_forward_save_ctx(self, ctxs: Any, input_: Tensor, saved: Any, **_: Any) -> None:
            ctxs[0].save_for_backward(*saved)

    pattern = [tops.SiLU, tops.optional(tops.ConstantScale)]
    for ops in ([tops.SiLU(), tops.ConstantScale(0.5)], [tops.SiLU(), tops.Identity()]):
        make = lambda ops=ops: [tops.Linear(6, 6), *copy.deepcopy(ops)]  # noqa: E731
        check_fusion(Scaled, make, torch.randn(3, 6), pattern=pattern)
    with tops.register_forward_fusion(Scaled, pattern=pattern):
        assert steps([tops.SiLU(), tops.ConstantScale(0.5)])[0] == ("Scaled", (0, 1))
        assert steps([tops.SiLU(), tops.Identity()])[0] == ("Scaled", (0,))


def test_every_run_is_taken_once() -> None:
    ops = [*mlp()[:2], *mlp()[2:], tops.ReLU()]
    with joint():
        assert steps(ops) == [("Epilogue", (0, 1, 2)), ("Epilogue", (3, 4, 5))]


def test_idle_ops_are_not_passed_over() -> None:
    # The fused op has a context for each op that its pattern names.
    ops = [tops.BasicLinear(6, 6), tops.Dropout(0.0), tops.SiLU()]
    with joint():
        assert "Epilogue" not in dict(steps(ops))
        reason = "op 1 is Dropout, which does nothing now but has no entry in the pattern,"
        ((found, why),) = misses(ops)
        assert found == (0, 1) and why == f"{reason} where it needs Bias or SiLU or ReLU"


def test_subclasses_are_ops_of_their_class() -> None:
    class MySiLU(tops.SiLU):
        pass

    with joint():
        assert steps([tops.BasicLinear(6, 6), MySiLU()]) == [("Epilogue", (0, 1))]
    with joint(tops.BasicLinear, MySiLU):
        assert steps([tops.BasicLinear(6, 6), MySiLU()]) == [("Epilogue", (0, 1))]
        assert "Epilogue" not in dict(steps([tops.BasicLinear(6, 6), tops.SiLU()]))


def test_python_ops_are_known_by_their_class() -> None:
    def make() -> type:
        class Twice(tops.BasicOperation):
            def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
                return input_ * 2

            def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
                return grad_output * 2, ()

        return Twice

    class Four(tops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
            return input_ * 4, [(), ()]

    one, other = make(), make()
    with tops.register_forward_fusion(Four, pattern=[one, one]):
        x = torch.randn(3, 6, requires_grad=True)
        assert steps([one(), one()], x) == [("Four", (0, 1))]
        assert torch.equal(x.grad, torch.full_like(x, 4))
        # An op of the same name, but of another class, does not match.
        assert "Four" not in dict(steps([one(), other()], x))


def test_a_guard_that_refuses_the_longest_match_may_take_a_shorter_one() -> None:
    def no_bias(ops: list[Any]) -> str | None:
        return "it has a bias" if len(ops) == 3 else None

    with joint(guard=no_bias):
        assert misses(mlp())[0] == ((0, 1, 2), "it has a bias")
        assert steps(mlp(bias=False))[0] == ("Epilogue", (0, 1))
        module = tops.Sequential(*mlp())
        module(torch.randn(3, 6))
        assert "Epilogue (joint) at 0-2: it has a bias" in str(module.explain())


def frozen(layer: tops.Linear) -> tops.Linear:
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [tops.SiLU(), tops.Linear(6, 6)],
        lambda: [tops.SiLU(), tops.Linear(6, 6), tops.SiLU()],
        lambda: [frozen(tops.Linear(6, 6)), tops.SiLU()],
    ],
    ids=["before", "around", "frozen"],
)
def test_a_joint_op_whose_first_ops_need_no_gradient(make: Any, compiled: bool) -> None:
    module, x = tops.Sequential(*make()), torch.randn(3, 6)
    module(x).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    pattern = [tops.optional(tops.SiLU), tops.BasicLinear, tops.Bias, tops.optional(tops.SiLU)]
    with tops.register_forward_backward_fusion(Chain, pattern=pattern):
        module.zero_grad()
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        run(x).sum().backward()
        assert module.plans()[0].forward[0].name == "Chain"
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


class Chain(tops.FusedOperation):
    """[SiLU], BasicLinear, Bias, [SiLU], which keeps its input in the first context."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        for op in self.basic_ops:
            if isinstance(op, tops.SiLU):
                x = torch.nn.functional.silu(x)
            elif isinstance(op, tops.BasicLinear):
                x = linear(x, weight, bias)
        return x

    def parameters_now(self) -> tuple[Tensor, Tensor]:
        product = next(op for op in self.basic_ops if isinstance(op, tops.BasicLinear))
        bias = next(op for op in self.basic_ops if isinstance(op, tops.Bias))
        return product.weight, bias.bias

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        output = self.run(input_, *self.parameters_now())
        return output, [()] * len(self.basic_ops), (input_,)

    fuser_forward_save_ctx = Epilogue.fuser_forward_save_ctx

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        (x,) = basic_op_ctxs[0].saved_tensors
        weight, bias = self.parameters_now()
        silu = torch.nn.functional.silu
        first = isinstance(self.basic_ops[0], tops.SiLU)
        hidden = silu(x) if first else x
        if isinstance(self.basic_ops[-1], tops.SiLU):
            grad_output = silu_gradient(grad_output, linear(hidden, weight, bias))
        grads: list[Any] = [()] * len(self.basic_ops)
        grads[int(first)] = (grad_output.T @ hidden,)
        grads[int(first) + 1] = (grad_output.sum(0),)
        grad = grad_output @ weight
        return silu_gradient(grad, x) if first else grad, grads, [()] * len(self.basic_ops)


def test_many_optional_entries_take_no_time() -> None:
    asked: list[int] = []

    def never(ops: list[Any]) -> str:
        asked.append(len(ops))
        return "no"

    module = tops.Sequential(*[tops.SiLU() for _ in range(40)])
    with joint(*[tops.optional(tops.SiLU)] * 25, tops.SiLU, guard=never):
        module(torch.randn(2, 6))
    # From each op, each length once.
    assert len(asked) <= 40 * 26 and max(asked) == 26


def test_an_op_in_the_middle_is_told_of() -> None:
    ops = [tops.LayerNorm(6), tops.Linear(6, 6), tops.GELU()]
    with joint(tops.LayerNorm, tops.BasicLinear, tops.Bias, tops.SiLU, tops.Bias):
        module = tops.Sequential(*ops)
        module(torch.randn(3, 6))
        told = "Epilogue (joint) at 0-3: op 3 is GELU where it needs SiLU"
        assert told in str(module.explain())


def test_ops_that_another_fusion_took() -> None:
    class Mine(Epilogue):
        pass

    with (
        joint(tops.BasicLinear, tops.SiLU),
        tops.register_forward_backward_fusion(Mine, pattern=[tops.SiLU, tops.Bias]),
        tops.register_forward_backward_fusion(Mine, pattern=[tops.LayerNorm, tops.BasicLinear]),
    ):
        ops = [tops.LayerNorm(6), tops.Linear(6, 6, bias=False), tops.SiLU()]
        assert misses(ops, "Mine") == [((0, 1, 2), "op 1 is taken by Epilogue")]
        module = tops.Sequential(*ops)
        module(torch.randn(3, 6))
        assert "Mine (joint) at 0-2: op 1 is taken by Epilogue" in str(module.explain())
        # The first op of a match, too.
        ops = [tops.Linear(6, 6, bias=False), tops.SiLU(), tops.Bias(6)]
        assert misses(ops, "Mine") == [((1, 2), "op 1 is taken by Epilogue")]
        assert misses([*ops[:2], tops.GELU()], "Mine") == []


def test_order_and_prepend() -> None:
    class First(Epilogue):
        pass

    with joint():
        keywords: dict[str, Any] = {"pattern": PATTERN, "prepend": True}
        with tops.register_forward_backward_fusion(First, **keywords):
            assert steps(mlp())[0][0] == "First"
        assert steps(mlp())[0][0] == "Epilogue"


def test_compiled_graphs_follow_the_registry() -> None:
    module = tops.Sequential(*mlp())
    x = torch.randn(3, 6)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.allclose(compiled(x), expected)
        with joint():
            assert torch.allclose(compiled(x), expected, atol=1e-6)
            assert module.plans()[0].forward[0].name == "Epilogue"


def test_the_handle() -> None:
    def guard(ops: list[Any]) -> None:
        return None

    with joint(guard=guard, name="mine") as handle:
        assert handle in tops.fusions() and handle.guard is guard
        assert [entry.names for entry in handle.pattern] == [
            ["BasicLinear"],
            ["Bias"],
            ["SiLU", "ReLU"],
        ]
        assert [entry.optional for entry in handle.pattern] == [False, True, False]
        with handle.disabled():
            assert "Epilogue" not in dict(steps(mlp()))
        assert steps(mlp())[0][0] == "Epilogue"
        module = tops.Sequential(*mlp())
        module(torch.randn(3, 6))
        assert module.explain().groups[0].forward[0].rule == "mine"
        with pytest.raises(ValueError, match="registered once in the forward_backward pass"):
            joint()
        # The same class for other ops.
        joint(tops.BasicLinear, tops.GELU).remove()
    assert not handle.registered


# ---- bad input


@pytest.mark.parametrize(
    "pattern, error, message",
    [
        ([], ValueError, r"pattern must have an entry that is not optional, got 0"),
        ([tops.optional(tops.Bias)], ValueError, "an entry that is not optional"),
        (tops.SiLU, TypeError, "pattern must be a list of classes of basic ops, got SiLU"),
        ({tops.SiLU}, TypeError, "pattern must be a list of classes of basic ops, got set"),
        ("SiLU", TypeError, "pattern must be a list of classes of basic ops, got str 'SiLU'"),
        (["SiLU"], TypeError, "pattern must name classes of basic ops, got str 'SiLU'"),
        ([torch.nn.ReLU], TypeError, "pattern must name classes of basic ops, got ReLU"),
        ([()], TypeError, "pattern must name classes of basic ops, got None"),
        ([tops.SiLU()], TypeError, "pattern must name classes of basic ops, got SiLU"),
        ([tops.Linear], TypeError, "got Linear, which stands for several: name those"),
    ],
)
def test_patterns_that_are_none(pattern: Any, error: type, message: str) -> None:
    before = tops.fusions()
    with pytest.raises(error, match=rf"\[fusion\] .*{message}"):
        tops.register_forward_backward_fusion(Epilogue, pattern=pattern)
    assert tops.fusions() == before


@pytest.mark.parametrize("entry", [tops.Linear, 3, torch.nn.SiLU])
def test_optional_checks_its_classes(entry: Any) -> None:
    with pytest.raises(TypeError, match="pattern must name classes of basic ops"):
        tops.optional(entry)
    with pytest.raises(TypeError, match="pattern must name classes of basic ops, got None"):
        tops.optional()


def test_what_does_not_go_together() -> None:
    before = tops.fusions()
    with pytest.raises(TypeError, match=r"a fused op must have a pattern, got .*Epilogue"):
        tops.register_forward_backward_fusion(Epilogue)
    with pytest.raises(TypeError, match="a guard must have a pattern"):
        tops.register_forward_fusion(lambda ops, **unused: ops, guard=lambda ops: None)
    with pytest.raises(TypeError, match="guard must be callable or None, got str 'no'"):
        joint(guard="no")
    with pytest.raises(ValueError, match="must define fuser_backward, got Forward"):
        tops.register_backward_fusion(Forward, pattern=PATTERN)
    assert tops.fusions() == before


@pytest.mark.parametrize(
    "func, message",
    [
        (lambda ops: ops, "with a pattern must return a FusedOperation, got "),
        (lambda ops: Epilogue(ops[:2]), "must hold exactly the given basic ops in order, got "),
        (lambda ops: Forward(ops), "a fused op of the forward_backward pass must define"),
        (lambda ops: 1 / 0, "a forward_backward fusion must not raise, got ZeroDivisionError"),
    ],
)
def test_functions_that_make_no_fused_op(func: Any, message: str) -> None:
    module = tops.Sequential(*mlp())
    with tops.register_forward_backward_fusion(func, pattern=PATTERN, name="mine"):
        with pytest.raises(RuntimeError, match=rf"\[mine\] .*{message}"):
            module(torch.randn(3, 6))
    module(torch.randn(3, 6)).sum().backward()


@pytest.mark.parametrize(
    "guard, message",
    [
        (lambda ops: True, "a guard must return None or the reason why not, got bool True"),
        (lambda ops: ops[9], "a guard must not raise, got IndexError"),
    ],
)
def test_guards_that_misbehave(guard: Any, message: str) -> None:
    module = tops.Sequential(*mlp())
    with joint(guard=guard), pytest.raises(RuntimeError, match=rf"\[Epilogue\] {message}"):
        module(torch.randn(3, 6))
    module(torch.randn(3, 6)).sum().backward()
