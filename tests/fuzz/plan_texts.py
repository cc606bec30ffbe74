"""Edited texts of real plans: each parses and runs, or raises an error that says why."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import torch
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C

from .compare import Results, assert_all_near, gradients
from .errors import EXPECTED, assert_clear
from .models import Features, Model, random_model
from .report import about_to

ISOLATED = True

EDITED_TEXTS = 25
BATCHES = ((3,), (2, 3), (1,))
NUMBERS = ("0", "-1", "1", "7", "2147483648", "-9223372036854775808", "9223372036854775807")
NUMBERS += ("18446744073709551616", "1e308", "-0.0", "inf", "nan", "0.5")
CONSTANTS = ("none", "true", "false", '"gelu"', '"swiglu"', '""', "[]", "[true]", "[-1]", "[1, 2]")
CONSTANTS += ("[true, false, true]", *NUMBERS)
TARGETS = tuple(sorted({name for pair in _C.typed_op_pairs() for name in pair}))
TARGETS += ("aten::reshape", "aten::add", "aten::zeros_like", "no_such_op", "")
Edit = Callable[[list[str], random.Random], None]


# ---- edits of the lines of a text


def pick(lines: list[str], rng: random.Random, pattern: str = "") -> int | None:
    """A line that contains the pattern, except for the first one, which is `plan 1`."""
    found = [i for i, line in enumerate(lines) if i > 0 and re.search(pattern, line)]
    return rng.choice(found) if found else None


def drop_line(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng)) is not None:
        del lines[i]


def drop_the_end(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randint(max(1, len(lines) - 4), len(lines)) :]


def repeat_line(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng)) is not None:
        lines.insert(rng.randint(1, len(lines)), lines[i])


def swap_lines(lines: list[str], rng: random.Random) -> None:
    i, j = pick(lines, rng), pick(lines, rng)
    if i is not None and j is not None:
        lines[i], lines[j] = lines[j], lines[i]


def replace_some(line: str, pattern: str, new: Callable[[], str], rng: random.Random) -> str:
    found = list(re.finditer(pattern, line))
    if not found:
        return line
    match = rng.choice(found)
    return line[: match.start()] + new() + line[match.end() :]


VALUE = r"\b(?:[xgn]\d+|(?:dp|p|s|do|o|de|e)\d+\.\w+)\b"


def swap_value(lines: list[str], rng: random.Random) -> None:
    values = re.findall(VALUE, "\n".join(lines))
    if values and (i := pick(lines, rng, VALUE)) is not None:
        lines[i] = replace_some(lines[i], VALUE, lambda: rng.choice(values), rng)


def change_number(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng, r"\d")) is not None:
        lines[i] = replace_some(lines[i], r"-?\d+(?:\.\d+)?", lambda: rng.choice(NUMBERS), rng)


CALL = r"\(.*\)$"


def edit_list(lines: list[str], rng: random.Random, part: str, items: list[str]) -> None:
    """Drops, adds or replaces an item of the arguments or the results of a call."""
    if (i := pick(lines, rng, CALL)) is None:
        return
    results, _, call = lines[i].partition(" = ")
    target, _, arguments = call.partition("(")
    found = (arguments[:-1] if part == "arguments" else results.strip()).split(", ")
    place = rng.randrange(len(found))
    kind = rng.randrange(3)
    if kind == 0:
        del found[place]
    elif kind == 1:
        found.insert(place, rng.choice(items))
    else:
        found[place] = rng.choice(items)
    text = ", ".join(found)
    if part == "arguments":
        lines[i] = f"{results} = {target}({text})"
    else:
        lines[i] = f"  {text} = {target}({arguments}"


def edit_arguments(lines: list[str], rng: random.Random) -> None:
    values = re.findall(VALUE, "\n".join(lines))
    edit_list(lines, rng, "arguments", [*values[:10], *CONSTANTS])


def edit_results(lines: list[str], rng: random.Random) -> None:
    values = re.findall(VALUE, "\n".join(lines))
    edit_list(lines, rng, "results", [*values, "s0.unused", "x99", "dp0.weight"])


def change_target(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng, CALL)) is not None:
        lines[i] = re.sub(r"= [\w:]+\(", lambda _: f"= {rng.choice(TARGETS)}(", lines[i])


def change_flag(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng, "true|false")) is not None:
        flip = {"true": "false", "false": "true"}
        which = rng.choice(re.findall("true|false", lines[i]))
        lines[i] = lines[i].replace(which, flip[which], 1)


def change_step(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng, "^(forward|backward)")) is None:
        return
    extras = [" skipped=true", " python=0", " joint=true", " compute=bfloat16", " what=1"]
    if rng.random() < 0.5:
        lines[i] = lines[i].replace(" skipped=true", "") + rng.choice(extras)
    else:
        lines[i] = re.sub(r"^\w+", lambda m: rng.choice(["forward", "backward", "save"]), lines[i])


def change_character(lines: list[str], rng: random.Random) -> None:
    if (i := pick(lines, rng, ".")) is not None:
        place = rng.randrange(len(lines[i]))
        new = rng.choice(['"', "[", "(", ",", " ", "=", "\\", "\t", "\0", "é", "9", ""])
        lines[i] = lines[i][:place] + new + lines[i][place + 1 :]


EDITS: tuple[Edit, ...] = (
    drop_line,
    drop_the_end,
    repeat_line,
    swap_lines,
    swap_value,
    swap_value,
    change_number,
    change_number,
    edit_arguments,
    edit_arguments,
    edit_results,
    change_target,
    change_flag,
    change_step,
    change_character,
)


def edited(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(lines) > 1:
            rng.choice(EDITS)(lines, rng)
    return "\n".join(lines) + "\n" * (rng.random() < 0.9)


# ---- what a text must do


class Subject:
    """A plan's text, and the tensors that it takes; each may require a gradient or not."""

    def __init__(self, model: Model, text: str, tensors: list[Tensor], extra_inputs: int) -> None:
        self.model, self.text, self.tensors = model, text, tensors
        self.extra_inputs = extra_inputs

    def run(self, text: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        end = 1 + self.extra_inputs
        return torch.ops.transformer_ops.run_plan(
            text, tensors[0], list(tensors[1:end]), list(tensors[end:])
        )

    def draw_flags(self, rng: random.Random) -> None:
        for tensor in self.tensors:
            tensor.requires_grad_(rng.random() < 0.6)

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def make_subject(rng: random.Random) -> Subject:
    model = random_model(rng, Features(), longest=6, batches=BATCHES)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in model.shapes]
    for tensor in (*inputs, *model.module.parameters()):
        tensor.requires_grad_(rng.random() < 0.7)
    model.module(*inputs)
    (group,) = model.module._groups()
    parameters = [p for op in group._basic_ops for p in op._parameter_tensors() if p is not None]
    tensors = [*inputs, *(parameter.detach().clone() for parameter in parameters)]
    return Subject(model, str(group.plan()), tensors, len(inputs) - 1)


def random_grads(outputs: list[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]


def check_parse(text: str) -> bool:
    """Whether the text parses; the text of the parsed plan must parse to the same."""
    try:
        plan = tops.Plan.parse(text)
    except EXPECTED as error:
        assert_clear(error, text)
        return False
    assert tops.Plan.parse(str(plan)) == plan, text
    return True


def wanted_results(subject: Subject, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results of the model in plain torch, and its leaves."""
    own = dict(zip(parameter_ids(subject.model), tensors[1 + subject.extra_inputs :], strict=True))
    named = {name: own[id(p)] for name, p in subject.model.all_parameters().items()}
    outputs = subject.model.meaning(tensors[: 1 + subject.extra_inputs], named)
    return list(outputs), [tensor for tensor in tensors if tensor.requires_grad]


def parameter_ids(model: Model) -> list[int]:
    return [id(p) for p in model.module.parameters()]


def check_unchanged(subject: Subject) -> int:
    """Runs the text itself with any tensors requiring a gradient: all numbers must be right, and
    none may be missing."""
    about_to(f"run_plan({subject.text!r}, ...), {[t.requires_grad for t in subject.tensors]}")
    outputs = subject.run(subject.text, subject.tensors)
    grads = random_grads(outputs)
    wanted, leaves = wanted_results(subject, subject.tensors)
    got: Results = [*outputs, *gradients(outputs, subject.leaves, grads)]
    want: Results = [*wanted, *gradients(wanted, leaves, grads)]
    flags = [tensor.requires_grad for tensor in subject.tensors]
    return assert_all_near(got, want, f"the text, flags {flags},\n{subject.text}")


def check_edited(subject: Subject, text: str) -> int:
    flags = [tensor.requires_grad for tensor in subject.tensors]
    about_to(f"Plan.parse({text!r}), then run_plan, flags {flags}, of\n{subject.model}")
    if not check_parse(text):
        return 1
    before = [tensor.detach().clone() for tensor in subject.tensors]
    try:
        outputs = subject.run(text, subject.tensors)
        found = gradients(outputs, subject.leaves, random_grads(outputs))
    except EXPECTED as error:
        assert_clear(error, text)
        return 1
    for now, then in zip(subject.tensors, before, strict=True):
        assert torch.equal(now, then), f"a tensor has changed under\n{text}"
    for i in dropped_gradients(subject, text, found):
        raise AssertionError(f"no gradient for tensor {i} of {flags}, which wants one, by\n{text}")
    return 1


def dropped_gradients(subject: Subject, text: str, found: Results) -> list[int]:
    """The tensors to which the decomposition gives a gradient, but the text does not."""
    tensors = [tensor.detach() for tensor in subject.tensors]
    try:
        outputs, pull = torch.func.vjp(lambda *given: subject.run(text, given), *tensors)
        meant = pull([grad for grad in random_grads(outputs) if grad is not None])
    except EXPECTED as error:
        assert_clear(error, text)
        return []
    given = iter(found)
    return [
        i
        for i, tensor in enumerate(subject.tensors)
        if tensor.requires_grad and next(given) is None and meant[i].any()
    ]


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    subject = make_subject(rng)
    count = 0
    for _ in range(3):
        subject.draw_flags(rng)
        count += check_unchanged(subject)
    for _ in range(EDITED_TEXTS):
        subject.draw_flags(rng)
        count += check_edited(subject, edited(subject.text, rng))
    return count
