"""`check_fuse_rule`: a rule of `fuse` against the statements that it replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..models.fuse import fuse
from ..models.nearest import nearest_statements
from ..models.report import FuseReport
from ..models.rules import FuseRule, rules_named
from ..op.methods import shown
from .comparison import Comparison, FusionCheck, check_inputs, check_tolerances
from .subject import Subject, with_attributes
from .ways import Way, compiled_ways, eager_ways

__all__ = ["check_fuse_rule"]


def check_fuse_rule(
    rule: FuseRule | str,
    model: nn.Module,
    *inputs: Tensor,
    rtol: float | None = None,
    atol: float | None = None,
) -> FusionCheck:
    """Verifies a rule of `fuse`: that it fires in the model, and that all outputs and gradients
    equal those of the statements that its ops replace.

    Copies of the model run, in the ways of `check_fusion`: with each `recompute`, frozen
    parameters, other shapes, layouts and dtypes, autocast, eval, a second backward, and under
    `torch.compile`. A way that the model itself refuses is not tried.

    Args:
        rule: what `register_fuse_rule` returned, or the name of a rule. No other rule is used.
        model: a module with statements that the rule replaces; it does not change.
        inputs: the arguments of the model.
        rtol, atol: as for `check_fusion`.

    Returns:
        What was tried.

    Raises:
        AssertionError: the rule fires nowhere, its `when` is never true, its ops raise, or a number
            differs; the message says which.
        TypeError, ValueError: an argument is wrong.
    """
    if not isinstance(rule, FuseRule | str):
        raise TypeError(f"[check_fuse_rule] rule must be a FuseRule or its name, got {shown(rule)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"[check_fuse_rule] model must be an nn.Module, got {shown(model)}")
    if not inputs:
        raise TypeError("[check_fuse_rule] inputs must be tensors, one at least, got ()")
    check_inputs("check_fuse_rule", inputs)
    check_tolerances("check_fuse_rule", rtol, atol)
    (found,) = rules_named([rule])
    check = _Rule(found, inputs, rtol, atol)
    fused, unfused = _Model(model, check.counted), _Model(model, None)
    check.report.lists.append(fused.check_matches(found))
    (numbers,) = check.run(fused, unfused, "", [Way()])
    parameters = fused.parameters
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    ways = eager_ways(
        parameters, fused.attributes, dtype, len(inputs), len(numbers.shared), alone=False
    )
    check.run(fused, unfused, "", list(ways)[1:])
    compiled = [way._replace(compiled=True) for way in compiled_ways(parameters)]
    check.run(fused, unfused, "", compiled)
    return check.report


class _Model(Subject):
    """Copies of a model, fused by the rule unless it is None."""

    keeps_random_state = False  # the first call makes ops, and their parameters may be random

    def __init__(self, model: nn.Module, rule: FuseRule | None) -> None:
        self._model, self._rule = model, rule
        self._copies: dict[tuple[Any, ...], tuple[nn.Module, FuseReport | None]] = {}

    def report(self, way: Way) -> FuseReport:
        """What `fuse` said of the copy that runs in this way."""
        report = self._copy(way)[1]
        assert report is not None
        return report

    def check_matches(self, rule: FuseRule) -> str:
        """The modules that are fused. Raises AssertionError if there is none."""
        report = self.report(Way())
        if not report.fused:
            why = "; ".join(f"{row.path or row.kind}: {row.reason}" for row in report.skipped)
            nearest = nearest_statements(rule, self._model) or "no statements of its kind"
            raise AssertionError(
                f"[{rule.name}] the rule must fuse a part of {type(self._model).__name__}, got "
                f"{why or nearest}"
            )
        return ", ".join(f"{row.path or 'the model'} ({row.kind})" for row in report.fused)

    def _copy(self, way: Way) -> tuple[nn.Module, FuseReport | None]:
        key = (way.dtype, way.training, way.recompute, way.attributes)
        if key not in self._copies:
            made = copy.deepcopy(self._model)
            for module in made.modules():
                module.training = module.training and way.training
            if way.dtype is not None:
                made.to(way.dtype)
            with_attributes(way, ((module, ("eps", "p")) for module in made.modules()))
            rules = [] if self._rule is None else [self._rule]
            report = fuse(made, rules=rules, recompute=way.recompute) if rules else None
            self._copies[key] = made, report
        return self._copies[key]

    def _modules(self, way: Way) -> list[nn.Module]:
        return list(self._copy(way)[0].modules())

    def _parameters(self, way: Way) -> dict[str, Tensor]:
        named = self._copy(way)[0].named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _callable(self, way: Way) -> Callable[..., Any]:
        model = self._copy(way)[0]

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(leaf for leaf in tree_leaves(model(*tensors)) if isinstance(leaf, Tensor))

        return call

    def _is_traceable(self, way: Way) -> bool:
        return False  # the model may have graph breaks of its own


class _Rule(Comparison):
    """Runs a model with and without a rule."""

    errors_have_names = False

    def __init__(self, rule: FuseRule, *arguments: Any) -> None:
        super().__init__(FusionCheck(rule.name), *arguments)
        self.answers: list[bool] = []
        # With a condition, only its answers show whether the ops ran.
        self.counted = rule if rule.when is None else rule._replace(when=self._when(rule.when))

    def _when(self, when: Callable[[Any, Tensor], bool]) -> Callable[[Any, Tensor], bool]:
        def counted(module: Any, tensor: Tensor) -> bool:
            self.answers.append(bool(when(module, tensor)))
            return self.answers[-1]

        return counted

    def unfused_scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    fused_scope = unfused_scope

    def check_fires(self, fused: _Model) -> None:
        if self.counted.when is not None and not any(self.answers):
            raise AssertionError(
                f"[{self.report.name}] when must be true for the inputs, got {self.answers}"
            )

    def is_fused(self, fused: _Model, where: str, way: Way) -> bool:
        answers, self.answers = self.answers, []
        is_asked = self.counted.when is None or way.compiled
        return bool(fused.report(way).fused) and (is_asked or any(answers))
