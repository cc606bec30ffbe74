"""Every typed op with valid and with wrong arguments must give right numbers or one clear error.

After each call: there is no crash, the arguments have not changed, and meta tensors raise the same
error. A successful call gives the numbers of the op's decomposition in float64, and its gradients.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

import torch
from process_groups import OLD_GROUPS
from torch import Tensor

from transformer_ops import _C

from . import report
from .typed_samples import (
    BAD_CONSTANTS,
    BAD_TENSORS,
    LAYOUTS,
    Sampler,
    expanded,
    names,
    overload,
)

ISOLATED = True
CALLS = 30

ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
# These are errors of the dispatcher, which knows the Python types of a schema and finds the device.
FOREIGN = re.compile(
    r"Expected a value of type|There were no tensor arguments|Could not run"
    # This one comes from the tests' own gather, which replaces torch's for old groups.
    + (r"|Could not resolve the process group" if OLD_GROUPS else "")
)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Call:
    """One call: its arguments, and which checks they allow."""

    def __init__(self, seed: int, index: int) -> None:
        self.random = Random(f"{seed} {index}")
        torch.manual_seed(self.random.randrange(2**31))
        everything = names()
        self.name = everything[(seed * CALLS + index) % len(everything)]
        self.base = self.name.removesuffix("_into")
        self.where = f"seed {seed}, call {index}"
        self.arguments = Sampler(self.random, self.name).arguments()
        self.fields = overload(self.name)._schema.arguments
        self.comparable = True
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            self.mutate(self.random.randrange(len(self.arguments)))

    def mutate(self, i: int) -> None:
        value, random = self.arguments[i], self.random
        if not isinstance(value, Tensor):
            kind = str(self.fields[i].type)
            choices = next((c for k, c in BAD_CONSTANTS.items() if kind.startswith(k)), (None,))
            self.arguments[i] = random.choice(choices)
            self.comparable = False
        elif not is_readable(value):
            pass
        elif random.random() < 0.5:
            self.arguments[i] = random.choice(LAYOUTS)(value)
        elif random.random() < 0.2:
            self.arguments[i] = expanded(value)
            # Statistics are those of the input.
            if self.fields[i].name in ("input", "mean", "rstd"):
                self.comparable &= all(field.name != "rstd" for field in self.fields)
        elif random.random() < 0.2:
            tensors = [v for v in self.arguments if isinstance(v, Tensor)]
            same = [v for v in tensors if v.shape == value.shape and v.dtype == value.dtype]
            self.arguments[i] = random.choice(same)
            self.comparable = False  # statistics are those of another input
        else:
            self.arguments[i] = random.choice(BAD_TENSORS)(random, value)
            self.comparable = False

    def __str__(self) -> str:
        return f"{self.where}: {self.name}({', '.join(self.describe())})"

    def describe(self) -> list[str]:
        return [
            f"{field.name}={describe(value)}"
            for field, value in zip(self.fields, self.arguments, strict=True)
        ]


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)} strides {list(value.stride())} on {value.device}"


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def attempt(call: Call, arguments: list[Any]) -> tuple[tuple[Tensor, ...] | None, str]:
    """The results, or none and the error's text."""
    try:
        return as_tuple(overload(call.name)(*arguments)), ""
    except ERRORS as error:
        text = str(error)
    assert "INTERNAL ASSERT" not in text and "please report a bug" not in text, f"{call}: {text}"
    # A missing kernel for a device is an error of the dispatcher.
    clear = text.startswith(f"[{call.name}] ") or FOREIGN.search(text)
    assert clear, f"{call}: the error must name the op, got {text}"
    return None, text


# ---- the checks


def bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def is_readable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and (value.numel() == 0 or value.untyped_storage().nbytes() > 0)
    )


def check_unchanged(call: Call, before: list[Any]) -> int:
    checks = 0
    for field, value, copy in zip(call.fields, call.arguments, before, strict=True):
        if copy is not None and field.name != "main_grad":
            assert torch.equal(bytes_of(value), copy), f"{call} changed {field.name}"
            checks += 1
    return checks


def check_meta(call: Call, results: tuple[Tensor, ...] | None, text: str) -> int:
    """Meta tensors give the same sizes and dtypes, or the same error."""
    tensors = [value for value in call.arguments if isinstance(value, Tensor)]
    if not tensors or any(t.device.type == "meta" for t in tensors) or "its memory" in text:
        return 0
    moved = [v.to("meta") if isinstance(v, Tensor) else v for v in call.arguments]
    found, meta_text = attempt(call, moved)
    if results is None or found is None:
        same = (results is None) == (found is None) and (text == meta_text or FOREIGN.search(text))
        # Copies on meta have their own memory and strides.
        same = same or "main_grad must" in text
        # A trace may know a group that this process does not know.
        same = same or "process group" in text
        assert same, f"{call}: got {text!r}, on meta {meta_text!r}"
        return 1
    for got, fake in zip(results, found, strict=True):
        assert got.shape == fake.shape and got.dtype == fake.dtype, f"{call}: meta differs"
        assert got.stride() == fake.stride(), (
            f"{call}: strides {got.stride()}, meta {fake.stride()}"
        )
    return len(found)


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    if got.shape != want.shape:
        return False
    want = want.double()
    limit = torch.finfo(dtype).max if dtype.is_floating_point else 0
    usable = want.isfinite() & (want.abs() < limit / 4)
    largest = want[usable].abs().max().item() if usable.any() else 0.0
    tolerance = TOLERANCES[dtype] * (1 + largest)
    return bool(((got.double() - want).abs()[usable] <= tolerance).all())


def lowest(call: Call) -> torch.dtype:
    """The dtype with the largest rounding among the arguments."""
    floats = [v.dtype for v in call.arguments if isinstance(v, Tensor) and v.is_floating_point()]
    return max(floats, key=lambda dtype: TOLERANCES[dtype])


def own_arguments(call: Call) -> list[Any]:
    return call.arguments[:-2] if call.name != call.base else call.arguments


def is_random(call: Call) -> bool:
    if torch.Tag.nondeterministic_seeded not in overload(call.base).tags:
        return False
    p = next(v for f, v in zip(call.fields, call.arguments, strict=True) if f.name == "p")
    return p not in (0.0, 1.0)


def check_meaning(call: Call, results: tuple[Tensor, ...], main_grad: Tensor | None) -> int:
    """The numbers are those of the decomposition in float64."""
    if not call.comparable or is_random(call):
        return 0
    wide = [
        v.detach().double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in own_arguments(call)
    ]
    want = list(_C.decomposition(call.base, tuple(wide)))
    dtype, checks = lowest(call), 0
    if main_grad is not None:
        weight = want.pop(1)
        buffer, overwrite = call.arguments[-2:]
        start = 0 if overwrite else main_grad.double()
        assert near(buffer, start + weight, dtype), f"{call}: wrong main_grad"
        checks += 1
    for field, got, ref in zip(overload(call.name)._schema.returns, results, want, strict=False):
        # Results that are not wanted are empty.
        if ref is not None and (got.numel() or not ref.numel()):
            assert near(got, ref, dtype), f"{call}: wrong {field.name}: {got}, not {ref}"
            checks += 1
    return checks


def jumps(call: Call) -> bool:
    """Whether rounding of a product may move an element over a kink, where the slope changes."""
    kinked = {"relu", "reglu", "clamped_swiglu"} & {v for v in call.arguments if isinstance(v, str)}
    return bool(kinked) and "linear" in call.name and lowest(call) != torch.float64


def check_gradients(call: Call) -> int:
    """The gradients of the first result are those of its decomposition in float64."""
    if not call.comparable or call.name != call.base or is_random(call) or jumps(call):
        return 0
    names_ = [field.name for field in call.fields]
    places = [
        i
        for i, v in enumerate(call.arguments)
        if isinstance(v, Tensor)
        and v.is_floating_point()
        # The decomposition computes them from the input.
        and names_[i] not in ("mean", "rstd")
        and call.random.random() < 0.7
    ]

    def gradients(
        wide: bool, cotangent: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        arguments = [
            True if field.name.startswith("save_") else value
            for field, value in zip(call.fields, call.arguments, strict=True)
        ]
        for i, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.is_floating_point():
                arguments[i] = value.detach().double() if wide else value.detach()
        for i in places:
            arguments[i].requires_grad_()
        if wide:
            first = _C.decomposition(call.base, tuple(arguments))[0]
        else:
            first = as_tuple(overload(call.name)(*arguments))[0]
        if first is None or not first.requires_grad or not first.numel():
            return [None] * len(places), None
        cotangent = torch.randn(first.shape, dtype=first.dtype) if cotangent is None else cotangent
        inputs = [arguments[i] for i in places]
        found = torch.autograd.grad(first, inputs, cotangent.to(first.dtype), allow_unused=True)
        return list(found), cotangent

    try:
        got, cotangent = gradients(False, None)
    except NotImplementedError:
        return 0
    if cotangent is None:
        return 0
    want, _ = gradients(True, cotangent)
    for i, a, b in zip(places, got, want, strict=True):
        assert (a is None) == (b is None) or not (b if a is None else a).any(), (
            f"{call}: gradient of {names_[i]}: {a}, not {b}"
        )
        if a is not None and b is not None:
            message = f"{call}: wrong gradient of {names_[i]}: {a}, not {b}"
            assert near(a, b, lowest(call)), message
    return len(got)


def check_call(call: Call) -> int:
    readable = [is_readable(value) for value in call.arguments]
    before = [
        bytes_of(value).clone() if good else None
        for value, good in zip(call.arguments, readable, strict=True)
    ]
    main_grad = None
    if call.name != call.base and isinstance(call.arguments[-2], Tensor) and readable[-2]:
        main_grad = call.arguments[-2].clone()
    report.about_to(str(call))
    results, text = attempt(call, call.arguments)
    checks = check_unchanged(call, before) + check_meta(call, results, text)
    if results is None:
        if main_grad is not None:
            buffer = call.arguments[-2]
            assert torch.equal(bytes_of(buffer), before[-2]), f"{call}: failed, and wrote main_grad"
        return checks + 1
    for result in results:
        for value in call.arguments:
            if isinstance(value, Tensor) and value.numel() and result.numel():
                storages = result.untyped_storage(), value.untyped_storage()
                alias = storages[0].data_ptr() == storages[1].data_ptr() != 0
                assert not alias, f"{call}: a result is an alias"
    if all(readable[i] or not isinstance(v, Tensor) for i, v in enumerate(call.arguments)):
        checks += check_meaning(call, results, main_grad)
        report.about_to(f"{call}, with gradients")
        checks += check_gradients(call)
    return checks


def run_seed(seed: int) -> int:
    return sum(check_call(Call(seed, index)) for index in range(CALLS))
