"""Compares fused ops with unfused ones in many ways, and reports what was tried."""

from __future__ import annotations

import math
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..op.methods import shown
from .subject import RANDOM_STATE, Numbers, Subject
from .ways import (
    LARGE_MEAN,
    OTHER_SIGN,
    STATES,
    THOUSANDS,
    TOGETHER,
    VERY_MANY_ROWS,
    WITHOUT,
    Way,
)

# The errors of autograd: a tensor that was saved for backward, or the base of an output that is a
# view of an input, is another one by now.
_CHANGED = re.compile("modified by an inplace operation|has been modified inplace")
# What a rule in C++ may refuse.
_FEW_DIMENSIONS = re.compile(r"must have at least \d dimensions")

# What begins the names of ways in which only the replaced ops run.
ALONE = "alone: "


# The ways that run twice.
_TWICE = ("eager", "bfloat16", "autocast")


def _is_same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.allclose(first, second, 0, 0, equal_nan=True)


def _is_listed(way: str) -> bool:
    return ", recompute=" not in way or way.startswith(TOGETHER)


def _again(way: str) -> str:
    return f'{way}, recompute="none"'


def _listed(ways: Sequence[str]) -> list[str]:
    """Each way once; the subsets without a gradient and the ways together as their number."""
    rows = dict.fromkeys(way.removeprefix(ALONE) for way in filter(_is_listed, ways))
    for start, what in (
        (WITHOUT, "subsets of inputs and parameters without a gradient"),
        (TOGETHER, "draws of several of these together"),
    ):
        found = [way for way in rows if way.startswith(start)]
        rows = dict.fromkeys(way for way in rows if way not in found)
        rows |= {f"{len(found)} {what}": None} if found else {}
    return list(rows)


def _refusals(found: dict[str, str]) -> list[str]:
    """The first ways that ops refuse, each with the error, and the number of the others."""
    listed = [f"{way} ({why})" for way, why in found.items() if _is_listed(way)]
    return listed if len(listed) <= 8 else [*listed[:6], f"{len(listed) - 6} more"]


class FusionCheck:
    """What a check tried; `print` shows it.

    Attributes:
        name: the fusion, or the rule.
        lists: the ops that ran: the whole list, and the ops that the fusion replaces, alone.
        tried: the ways in which they ran, and the numbers equal those of the unfused ops.
        not_fused: those of them in which nothing was fused.
        not_met: the classes of the pattern that no op has, and the forms of ops that none has: make
            another list with them.
        not_tried: the ways that the unfused ops refuse, with the error.
        refused: those that a rule in C++ alone refuses, as the input has too few dimensions.
        slots_read: for each slot of the replaced ops, whether a backward read it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lists: list[str] = []
        self.tried: list[str] = []
        self.not_fused: list[str] = []
        self.not_met: list[str] = []
        self.not_tried: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.slots_read: dict[str, bool] = {}

    def __str__(self) -> str:
        found = set(self.tried)
        read = [slot for slot, is_read in self.slots_read.items() if is_read]
        unread = [slot for slot in self.slots_read if slot not in read]
        refused, own_refused = map(_refusals, (self.not_tried, self.refused))
        lines = {
            "ops": self.lists,
            "tried with each recompute": _listed([w for w in self.tried if _again(w) in found]),
            "tried once": _listed([w for w in self.tried if _again(w) not in found]),
            "not fused": _listed(self.not_fused),
            "not tried": self.not_met,
            "the unfused ops refuse": refused,
            "only the fused ops refuse": own_refused,
            "slots that backward reads": read,
            "slots that it never reads": unread,
        }
        others = f", {len(self.not_fused)} of them not fused" if self.not_fused else ""
        text = [f"{self.name}: {len(self.tried)} ways equal the unfused ops{others}"]
        for head, items in lines.items():
            if items:
                line = f"{head}: {'; '.join(items)}"
                text += textwrap.wrap(line, 100, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(text)

    __repr__ = __str__


class Comparison(ABC):
    """One check of fused ops."""

    # Whether an error of the first fused call says what it comes from.
    errors_have_names = True
    # Whether the fused ops may refuse inputs of few dimensions, as a rule for rows does.
    may_refuse = False

    def __init__(
        self,
        report: FusionCheck,
        inputs: Sequence[Tensor],
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self.report, self.inputs, self.rtol, self.atol = report, inputs, rtol, atol
        # What the unfused ops give in float64, by way.
        self.exact: dict[Way, Numbers] = {}

    @abstractmethod
    def unfused_scope(self) -> AbstractContextManager[Any]:
        """The scope in which the unfused side runs."""

    @abstractmethod
    def fused_scope(self) -> AbstractContextManager[Any]:
        """The scope in which the fused side runs."""

    @abstractmethod
    def check_fires(self, fused: Any) -> None:
        """Raises AssertionError unless the first call was fused."""

    @abstractmethod
    def is_fused(self, fused: Any, where: str, way: Way) -> bool:
        """Whether the last call was fused, as far as it can be."""

    def run(
        self, fused: Subject, unfused: Subject, where: str, ways: Sequence[Way]
    ) -> list[Numbers]:
        """Compares both sides in each way; returns the numbers of the fused one."""
        expected: dict[Way, Numbers | Exception] = {}
        found: list[Numbers | None] = []
        # Each change of scope makes plans anew, and most wrong fusions fail early.
        left, count = list(ways), 16
        while left:
            now, left, count = left[:count], left[count:], 4 * count
            with self.unfused_scope():
                for way in dict.fromkeys(way.reference() for way in now):
                    if way not in expected:
                        expected[way] = numbers = _run(unfused, self.inputs, way)
                        self._add_exact(unfused, way, numbers)
            with self.fused_scope():
                found += [self._compared(fused, where, w, expected[w.reference()]) for w in now]
        return [numbers for numbers in found if numbers is not None]

    def _add_exact(self, unfused: Subject, way: Way, numbers: Numbers | Exception) -> None:
        rounds = unfused.is_smooth and self._is_rounded(way)
        if isinstance(numbers, Exception) or not rounds:
            return
        found, live = numbers.tensors.items(), numbers.differentiable
        dtypes = tuple(t.dtype for n, t in found if t is not None and n in live)
        exact = _run(unfused, self.inputs, way._replace(exact=dtypes))
        if isinstance(exact, Numbers):
            self.exact[way] = exact

    def _is_rounded(self, way: Way) -> bool:
        """Whether 16-bit numbers round in this way, and float64 can compute the same."""
        given = (t.dtype for t in self.inputs if t.is_floating_point())
        dtypes = {way.dtype, way.autocast, way.input_dtype, *given}
        is_low = bool(dtypes & {torch.float16, torch.bfloat16})
        return way.has_exact and (is_low or way == Way().reference())

    def _compared(
        self, fused: Subject, where: str, way: Way, expected: Numbers | Exception
    ) -> Numbers | None:
        is_first = way == Way() and not where
        report, name = self.report, f"[{self.report.name}] {where}{way.name}:"
        if isinstance(expected, Exception):
            if is_first:
                raise expected
            report.not_tried[where + way.name] = str(expected).partition("\n")[0]
            return None
        try:
            actual = fused.run(self.inputs, way)
        except Exception as error:
            if way.changed and way.changed not in STATES and _CHANGED.search(str(error)):
                report.tried.append(where + way.name)
                return None
            if is_first and self.errors_have_names:
                raise
            if self.may_refuse and _FEW_DIMENSIONS.search(str(error)):
                report.refused[where + way.name] = str(error).partition("\n")[0]
                return None
            raise AssertionError(
                f"{name} the fused ops must not raise, got {type(error).__name__}: {error}"
            ) from error
        if is_first:
            self.check_fires(fused)
        try:
            compare(name, way, actual, expected, self.rtol, self.atol)
            exact = self.exact.get(way.reference())
            if exact is not None and self.rtol is None and self.atol is None:
                compare_errors(name, actual, expected, exact)
        except AssertionError as error:
            if way.attributes:
                hint = "; a guard may refuse ops with attributes that the fusion does not compute"
                raise AssertionError(f"{error}{hint}") from error
            if not way.changed:
                raise
            if way.changed in STATES:
                raise AssertionError(
                    f"[{report.name}] what backward reads of modules must be what forward stored "
                    f"in a context, as it may change, got {way.changed} that backward read: {error}"
                ) from error
            raise AssertionError(
                f"[{report.name}] a tensor that backward reads must be saved with "
                f"save_for_backward, so that autograd finds changes in place, got {way.changed} "
                f"unsaved: {error}"
            ) from error
        report.tried.append(where + way.name)
        is_fused = self.is_fused(fused, where, way)
        if way.name in _TWICE and self.inputs[0].device.type == "cpu":
            again = fused.run(self.inputs, way)
            differs = [n for n, t in actual.tensors.items() if not _is_same(t, again.tensors[n])]
            if differs:
                raise AssertionError(
                    f"{name} two equal calls must give the same numbers, got another {differs[0]}"
                )
        if not is_fused:
            report.not_fused.append(where + way.name)
        return actual


def _run(subject: Subject, inputs: Sequence[Tensor], way: Way) -> Numbers | Exception:
    try:
        return subject.run(inputs, way)
    except Exception as error:
        return error


# (rtol, atol relative to the largest value): sums are in another order, and 16-bit numbers are
# rounded a different number of times.
_TOLERANCES = {
    torch.float64: (1e-8, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}


def _size(tensor: Tensor | None) -> float:
    """The largest number."""
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    size: float = tensor.detach().abs().nan_to_num(0, 0, 0).max().item()
    return size


def compare_errors(where: str, actual: Numbers, expected: Numbers, exact: Numbers) -> None:
    """Raises AssertionError if the fused ops round much more than the unfused ones do."""
    for name, wanted in expected.tensors.items():
        found, true = actual.tensors[name], exact.tensors.get(name)
        if found is None or wanted is None or true is None or not wanted.is_floating_point():
            continue
        numbers = [t.double() for t in (found, wanted, true)]
        is_number = torch.stack([t.isfinite() for t in numbers]).all(0)
        if not is_number.any():
            continue
        own, other, size = (
            t[is_number].square().mean().sqrt().item()
            for t in (numbers[0] - numbers[2], numbers[1] - numbers[2], numbers[2])
        )
        # Steps that compute with 16-bit tensors have up to 3 times the error of the unfused ops.
        # The error of a few numbers is a matter of chance.
        factor = 4 + 64 / int(is_number.sum())
        least = size * max(torch.finfo(wanted.dtype).eps / 4, 2**-22)
        if own > factor * max(other, least):
            raise AssertionError(
                f"{where} {name} must be about as near to the result in float64 as that of the "
                f"unfused ops, whose mean error is {other:.2g}, got {own:.2g}: the fused ops round "
                "what the ops do not, or compute another formula"
            )


def compare(
    where: str,
    way: Way,
    actual: Numbers,
    expected: Numbers,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raises AssertionError unless the fused ops gave what the unfused ones did."""
    missing = set(expected.tensors) ^ set(actual.tensors)
    if missing:
        raise AssertionError(f"{where} outputs must be the same, got {sorted(missing)} on one side")
    # One step for several ops may give more outputs a history than the ops do.
    if not expected.differentiable <= actual.differentiable:
        raise AssertionError(
            f"{where} the outputs that require a gradient must be "
            f"{sorted(expected.differentiable)}, got {sorted(actual.differentiable)}"
        )
    # The other dtypes whose rounding errors the numbers have.
    rounded = {torch.bfloat16 if way.autocast else None, way.input_dtype} - {None}
    if way.input_dtype is not None:
        rounded |= {t.dtype for t in expected.tensors.values() if t is not None}
    # Equal gradients cancel in a norm, so only rounding errors may be left.
    is_expanded = way.layout == "expanded gradient"
    largest = max(map(_size, expected.tensors.values())) if is_expanded else 0.0
    outputs = [t for n, t in expected.tensors.items() if t is not None and n in expected.shared]
    overflows = not all(output.isfinite().all() for output in outputs)
    underflows = any(_size(t) < 2**-14 for t in outputs if t.dtype == torch.float16)
    for name, wanted in expected.tensors.items():
        found = actual.tensors[name]
        if name == RANDOM_STATE and way.compiled:
            continue
        if found is None and wanted is None:
            continue
        if found is None or wanted is None:
            other = wanted if found is None else found
            assert other is not None
            found, wanted = (torch.zeros_like(other) if t is None else t for t in (found, wanted))
        # A fusion may compute more precisely, and then its numbers do not overflow. What is not a
        # number makes others so in ways of its own.
        if torch.float16 in (way.dtype, way.autocast) or not way.is_finite:
            is_number = (wanted if way.is_finite else found).isfinite()
            # Backward may compute anything of an output that overflows.
            is_number = is_number & found.isfinite() if overflows else is_number
            found, wanted = found[is_number], wanted[is_number]
        relative, part = max(
            _TOLERANCES.get(t, (0.0, 0.0))
            for t in (wanted.dtype, *(rounded if wanted.is_floating_point() else ()))
        )
        # The deviations from a mean have fewer exact bits, long sums of 16 bits cancel, and the
        # slope of an activation is that of a large sum.
        less_exact = {LARGE_MEAN: 10, THOUSANDS: 4, VERY_MANY_ROWS: 4, OTHER_SIGN: 8}
        factor = less_exact.get(way.values or way.shape or way.name, 1)
        if (way.name.startswith(TOGETHER) and part > 1e-3) or underflows:
            # Rounding errors of several of these add up; those of tiny numbers are large.
            factor = 8
        relative, part = factor * relative, factor * part
        scale = max(_size(wanted), largest)
        # A given tolerance is meant for the caller's numbers.
        own = part * scale if way.values or way.gradient else 0.0
        label = f"{where} {name} differs from the unfused ops. "
        torch.testing.assert_close(
            found,
            wanted,
            rtol=relative if rtol is None else rtol,
            atol=part * scale if atol is None else max(atol, own),
            equal_nan=True,
            msg=label.__add__,
        )
    # An op that counts its calls changes, fused or not.
    changed = [name for name in actual.changed if name not in expected.changed]
    if changed:
        names = ", ".join(changed)
        raise AssertionError(f"{where} {names} must not change, got changes in place")
    is_plain = not (way.layout or way.compiled or way.weights)
    for name in sorted(actual.strided - expected.strided) if is_plain else ():
        rule = "be contiguous" if " and " not in name else "have memory of their own"
        raise AssertionError(
            f"{where} {name} must {rule}, as in the unfused ops, got other strides"
        )
    for name, shared in actual.shared.items() if not way.compiled else ():
        extra = sorted(shared - expected.shared[name])
        if extra:
            raise AssertionError(
                f"{where} {name} must have memory of its own, as that of the unfused ops, got that "
                f"of {', '.join(extra)}"
            )


def check_inputs(check: str, inputs: Sequence[object]) -> None:
    """Raises TypeError unless these are tensors, and ValueError unless they have numbers."""
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"[{check}] inputs must be tensors, got {shown(tensor)}")
        got = str(tensor.layout) if tensor.layout != torch.strided else ""
        if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
            got = got or f"{type(tensor).__name__} on {tensor.device}"
        if not got and tensor.numel() and not tensor.untyped_storage().size():
            got = "freed memory"
        if got:
            raise ValueError(f"[{check}] inputs must be dense tensors with numbers, got {got}")


def check_tolerances(check: str, rtol: object, atol: object) -> None:
    """Raises TypeError or ValueError unless each is a number >= 0, or None."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"[{check}] {name} must be a number or None, got {shown(value)}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"[{check}] {name} must be finite and >= 0, got {shown(value)}")
