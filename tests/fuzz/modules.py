"""Random modules with random edits between their calls: fused, they do what they did before."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import linecache
import pickle
import random
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import transformer_ops as tops
from transformer_ops.models import fused_class

from .module_edits import EDITS, random_call, random_edit
from .module_parts import BATCH, PRELUDE, ROWS, WIDTH
from .module_sources import Node, Source
from .module_writer import random_source

ISOLATED = False

CASES_A_SEED = 40
# A fuzzer that fuses nothing tests nothing.
LEAST_FUSED = CASES_A_SEED // 5
MOST_STEPS = 8
# So many lists of edits and calls for each class: to match a class takes longer than to run it.
CASES_A_SOURCE = 4
FUSE, UNFUSE = "report = tops.fuse(m)", "tops.unfuse(m)"
# What only the fused model does.
OWN = (FUSE, UNFUSE, "str(report)")


@dataclass(frozen=True)
class Step:
    """An edit, or a call of the model, in a context if there is one."""

    text: str
    is_call: bool = False
    context: str = ""

    @property
    def is_own(self) -> bool:
        """Whether only the fused model does it."""
        return "tops." in self.text or "report" in self.text

    def __str__(self) -> str:
        return f"with {self.context}: {self.text}" if self.context else self.text


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it."""

    source: Source
    steps: list[Step]
    seed: int

    def __str__(self) -> str:
        steps = "\n".join(map(str, self.steps))
        text = self.source.text(steps)
        return f"{text.removeprefix(PRELUDE).strip()}\nm = Main().double()\n{steps}"


@dataclass(frozen=True)
class Difference:
    """What a fused model does otherwise: of some kind, and in words."""

    kind: str
    text: str


class Doubling(TorchFunctionMode):
    """Doubles what two functions give."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (F.linear, F.silu, F.gelu) else found


class Tagged(Tensor):
    """A tensor of a class of its own."""


class Noting(TorchFunctionMode):
    """Looks at all functions, and changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


Seen = dict[str, Any]
EDITS_TEXT = " ".join(EDITS)  # so that the source has all that edits name
# Errors of the plain model that may not come: products of fused models cast their input, GPT-2's
# Conv1D takes tensors of all strides, and torch is not asked about weights of inference mode
# (docs/differences.md).
ALLOWED = ("dtype", "view size is not compatible", "Inference tensors do not track version counter")
# The tolerances where bfloat16 or float32 is in use.
SHORT, FLOAT = 5e-2, 1e-4
# The plain model may save another tensor than the one that changed (docs/differences.md).
SAVED_ANOTHER = ("modified by an inplace operation", "has been modified inplace")
# It may have saved a copy of a weight that was made in inference mode (docs/differences.md).
OF_INFERENCE = "Inference tensors cannot be saved for backward"
# What is compared by its value.
PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
HELPERS = {
    "first": lambda model, kind: next(one for one in model.modules() if isinstance(one, kind)),
    "collections": collections,
    "copy": copy,
    "gc": gc,
    "pickle": pickle,
    "functional_call": functional_call,
    "tops": tops,
    "Doubling": Doubling,
    "Noting": Noting,
    "Tagged": Tagged,
}
# What edits may replace for everybody.
SHARED: list[tuple[Any, tuple[str, ...]]] = [
    (F, ("silu", "gelu", "relu", "linear", "layer_norm", "rms_norm", "dropout")),
    (F, ("scaled_dot_product_attention",)),
    (torch, ("rsqrt", "sigmoid", "square")),
    (torch.nn, ("functional",)),
    *((kind, ("forward",)) for kind in (nn.Linear, nn.GELU, nn.LayerNorm, nn.Sequential)),
]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Puts back what edits replace for everybody."""
    before = [(owner, name, vars(owner)[name]) for owner, names in SHARED for name in names]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        if "__call__" in vars(nn.Linear):
            del nn.Linear.__call__


# ---- one model, plain or fused


class Loaded:
    """A module of Python, and what was in it: `fuse` looks at its classes once."""

    def __init__(self, name: str, text: str) -> None:
        path = f"<{name} module of a fuzzer>"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        module = types.ModuleType(f"tops_fuzzed_{name}")
        sys.modules[module.__name__] = module
        self.text, self.names = text, vars(module)
        torch.manual_seed(0)
        exec(compile(text, path, "exec"), self.names)
        self.before = dict(self.names)
        self.classes = {
            kind: dict(vars(kind))
            for kind in self.before.values()
            if isinstance(kind, type) and kind.__module__ == module.__name__
        }
        self.settings, self.acts = vars(self.before["SETTINGS"]).copy(), self.before["ACTS"].copy()

    def restore(self) -> None:
        self.names.clear()
        self.names.update(self.before, SETTINGS=types.SimpleNamespace(**self.settings))
        self.names.update(LOG=[], ACTS=self.acts.copy())
        for kind, known in self.classes.items():
            for name in vars(kind).keys() - known.keys():
                delattr(kind, name)
            for name, value in known.items():
                if vars(kind).get(name, self) is not value:
                    setattr(kind, name, value)
        # Edits change fused classes, too.
        fused_class._classes.clear()


_loaded: dict[str, Loaded] = {}


def loaded(name: str, text: str) -> dict[str, Any]:
    """The names of a module with this source, as they are after its import."""
    found = _loaded.get(name)
    if found is None or found.text != text:
        found = _loaded[name] = Loaded(name, text)
    found.restore()
    return found.names


class World:
    """A model in a module of its own, so that classes and globals may differ."""

    def __init__(self, case: Case, name: str, noise: float = 0.0) -> None:
        self.is_fused, self.noise = name == "fused", noise
        self.names = loaded(name, case.source.text(EDITS_TEXT))
        torch.manual_seed(case.seed)
        self.names |= {**HELPERS, "HANDLES": []}
        self.names["m"] = self.names["other"] = self.names["Main"]().double()
        self.names["LOG"].clear()

    def close(self) -> None:
        for handle in self.names["HANDLES"]:
            handle.remove()

    def run(self, step: Step, seed: int) -> dict[str, Any]:
        """What can be seen of a step, by name."""
        torch.manual_seed(seed)
        if step.is_own and not self.is_fused:
            return {}
        seen: dict[str, Any] = {}
        try:
            if step.is_call:
                self._call(step, seen)
            else:
                exec(step.text, self.names)
        except Exception as error:
            seen["error"] = error
        return seen | self._state()

    def _call(self, step: Step, seen: dict[str, Any]) -> None:
        leaves = inputs(self.noise)
        # In-place operations reject leaves.
        names = {name: leaf * 1 for name, leaf in leaves.items()}
        with eval(step.context, self.names) if step.context else contextlib.nullcontext():
            self.names.update(names)
            outputs = flat(eval(step.text, self.names))
        seen["generator after forward"] = torch.get_rng_state()
        torch.manual_seed(len(outputs))
        seen["outputs"] = outputs
        seen["inputs"] = list(names.values())
        for name in names:
            del self.names[name]
        tensors = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        seen["which require a gradient"] = [getattr(one, "requires_grad", 0) for one in outputs]
        tensors = [one for one in tensors if one.is_floating_point()]
        if tensors:
            by_name = dict(self.names["m"].named_parameters())
            wanted = {n: p for n, p in {**leaves, **by_name}.items() if p.requires_grad}
            ones = [torch.randn(one.shape, dtype=torch.float64).to(one) for one in tensors]
            try:
                found = torch.autograd.grad(tensors, list(wanted.values()), ones, allow_unused=True)
                seen["gradients"] = dict(zip(wanted, found, strict=True))
            except Exception as error:
                seen["error of backward"] = error

    def _state(self) -> dict[str, Any]:
        """What calls and edits may change."""
        seen: dict[str, Any] = {"generator": torch.get_rng_state()}
        seen["notes"] = list(self.names["LOG"])
        self.names["LOG"].clear()
        kept = (int, float, str, Tensor, list)
        seen["globals"] = {
            k: v
            for k, v in self.names.items()
            if isinstance(v, kept) and k[0] != "_" and k not in ("LOG", "HANDLES")
        }
        model = self.names["m"]
        if isinstance(model, nn.Module):
            seen["attributes"] = {
                f"{path}.{k}": v
                for path, part in model.named_modules()
                for k, v in vars(part).items()
                if isinstance(v, kept) and not k.startswith("_")
            }
            seen["state dict"] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            seen["parts"] = [name for name, _ in model.named_modules()]
        return seen


def inputs(noise: float = 0.0) -> dict[str, Tensor]:
    """Leaves for calls, with noise relative to each number."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"x": (BATCH, ROWS, WIDTH), "y": (BATCH, ROWS, WIDTH), "row": (WIDTH,)}
    shapes |= {"scalar": (), "column": (BATCH, 1, WIDTH)}
    found = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }
    for one in found.values():
        one.mul_(1 + noise * torch.randn(one.shape, dtype=torch.float64, generator=generator))
        one.requires_grad_()
    return found


def flat(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [*found, *flat(list(found.values()))]
    if isinstance(found, list | tuple):
        return [inner for one in found for inner in flat(one)]
    return [found]


# ---- differences


def find_difference(want: Any, got: Any, what: str, tolerance: float) -> Difference | None:
    """The first difference between two things that were seen; None if there is none."""
    kind = what.split(":")[0]
    if got is None and kind == "gradients" and isinstance(want, Tensor) and not want.any():
        return None  # a second derivative of ReLU is absent, not zero
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        return _difference_of_tensors(want, got, what, tolerance)
    if isinstance(want, dict) and isinstance(got, dict):
        if want.keys() != got.keys():
            keys = sorted(map(str, want.keys() ^ got.keys()))
            return Difference(f"{kind} {keys}", f"{what}: only one has {keys}")
        pairs = [(want[key], got[key], f"{what}: {key}") for key in want]
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(want) != len(got):
            return Difference(f"{kind} count", f"{what}: {want}, fused: {got}")
        pairs = [(a, b, f"{what}: {i}") for i, (a, b) in enumerate(zip(want, got, strict=True))]
    elif isinstance(want, PLAIN) or isinstance(got, PLAIN):
        is_same = type(want) is type(got) and (want == got or want != want)
        return None if is_same else Difference(f"{kind} value", f"{what}: {want}, fused: {got}")
    else:
        return None  # modules and functions, which are others in each world
    found = (find_difference(a, b, name, tolerance) for a, b, name in pairs)
    return next((one for one in found if one is not None), None)


def difference_of_steps(want: Seen, got: Seen, tolerance: float) -> Difference | None:
    """The first difference between what was seen of a step."""
    for stage in ("error", "error of backward"):
        a, b = want.get(stage), got.get(stage)
        # A wrong use of in-place operations is not found where other tensors are saved. An op
        # reports a wrong shape by its own rule, as a RuntimeError.
        is_other = type(a) is not type(b) and not (stage == "error of backward" and b is None)
        is_rule = isinstance(a, ValueError) and isinstance(b, RuntimeError) and str(b)[0] == "["
        if is_other and not is_rule:
            text = "".join(c for c in str(b).split("\n")[0] if not c.isdigit())
            name = f"{stage}: {type(a).__name__}, fused: {type(b).__name__} {text[:50]}"
            return Difference(name, f"{stage}: {a!r}, fused: {b!r}")
    same = [key for key in want if key in got and not key.startswith("error")]
    found = (find_difference(want[key], got[key], key, tolerance) for key in same)
    return next((one for one in found if one is not None), None)


def _difference_of_tensors(
    want: Tensor, got: Tensor, what: str, tolerance: float
) -> Difference | None:
    kind = what.split(":")[0]
    if is_wrapped(want) or is_wrapped(got):
        return None  # of a transform that is over
    # Under autocast our norms return its dtype (docs/differences.md).
    is_cast = tolerance == SHORT and {want.dtype, got.dtype} == {torch.float32, torch.bfloat16}
    if want.shape != got.shape or (want.dtype != got.dtype and not is_cast):
        shapes = f"{want.dtype} {list(want.shape)}, fused: {got.dtype} {list(got.shape)}"
        return Difference(f"{kind} shape", f"{what}: {shapes}")
    if type(want) is not type(got) or want.device != got.device:
        kinds = f"{type(want).__name__} {want.device}, fused: {type(got).__name__} {got.device}"
        return Difference(f"{kind} class", f"{what}: {kinds}")
    if want.is_meta:
        return None
    if torch.equal(want, got) or not want.numel():
        return None
    a, b = want.detach().double(), got.detach().double()
    size = a.nan_to_num(0, 0, 0).abs().max().clamp(min=1.0)
    if torch.allclose(a / size, b / size, rtol=0, atol=tolerance, equal_nan=True):
        return None
    gap = (a - b).abs().max().item()
    return Difference(kind, f"{what} differs by {gap:.3g}, its size is {size.item():.3g}")


def tolerance_of(case: Case) -> float:
    """How far numbers may be apart, relative to the largest one of a tensor."""
    text = str(case)
    if "bfloat16" in text:
        return SHORT
    return FLOAT if "float" in text else 1e-8


# ---- a case


@dataclass
class Outcome:
    difference: Difference | None = None
    fused: bool = False
    calls: int = 0


def run_case(case: Case) -> Outcome:
    """Runs the plain model and the fused one side by side."""
    outcome = Outcome()
    worlds: list[World] = []
    wanted: Seen | None = None
    with restored():
        try:
            worlds += [World(case, name) for name in ("plain", "fused")]
        except Exception:
            return outcome
        try:
            for i, step in enumerate(case.steps):
                plain, fused = (world.run(step, case.seed + i) for world in worlds)
                if step.is_own:
                    if error := fused.get("error"):
                        name = f"{step.text} raises {type(error).__name__}"
                        outcome.difference = Difference(name, repr(error))
                        break
                    if step.text == FUSE:
                        outcome.fused |= bool(worlds[1].names["report"].fused)
                    continue
                error = plain.get("error")
                outcome.calls += step.is_call and error is None
                if any(text in str(error) for text in ALLOWED):
                    break
                if any(text in str(fused.get("error of backward")) for text in SAVED_ANOTHER):
                    break
                if OF_INFERENCE in str(fused.get("error")):
                    break
                found = difference_of_steps(plain, fused, tolerance_of(case))
                if found is not None:
                    where = f"step {i}, {step}: {found.text}"
                    outcome.difference = Difference(found.kind, where)
                    wanted = plain
                    break
                if error is not None and not step.is_call:
                    break  # nobody knows how far an edit went
        finally:
            for world in worlds:
                world.close()
    if wanted is not None and is_ill_conditioned(case, i, wanted):
        outcome.difference = None
    return outcome


def is_ill_conditioned(case: Case, step: int, wanted: Seen) -> bool:
    """Whether the plain model's own results of a step move where its inputs move by a rounding
    error of float32: no tolerance tells the errors of such results from a fault."""
    tolerance = tolerance_of(case)
    if tolerance != FLOAT:
        return False
    with restored():
        world = World(case, "moved", noise=torch.finfo(torch.float32).eps)
        try:
            seen = [world.run(one, case.seed + i) for i, one in enumerate(case.steps[: step + 1])]
        finally:
            world.close()
    return difference_of_steps(wanted, seen[-1], tolerance / 10) is not None


def random_case(rng: random.Random, source: Source | None = None) -> Case:
    source = source or random_source(rng)
    steps = []
    if rng.random() < 0.15:
        steps.append(Step(random_edit(rng, source)))
    if rng.random() < 0.1:
        steps.append(Step(*_call(rng)))
    steps.append(Step(FUSE))
    for _ in range(rng.randint(1, MOST_STEPS // 2)):
        steps.append(Step(*_call(rng)))
        if rng.random() < 0.1:
            steps.append(Step(rng.choice(OWN)))
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            steps.append(Step(random_edit(rng, source)))
    steps.append(Step(*_call(rng)))
    return Case(source, steps, rng.randrange(10**6))


def _call(rng: random.Random) -> tuple[str, bool, str]:
    text, context = random_call(rng)
    return text, True, context


# ---- a small case


def smaller(case: Case) -> Iterator[Case]:
    """The case without one thing."""
    for i in reversed(range(len(case.steps))):
        yield replace(case, steps=[*case.steps[:i], *case.steps[i + 1 :]])
    for source in smaller_sources(case.source):
        yield replace(case, source=source)
    for i, step in enumerate(case.steps):
        if step.context:
            yield replace(
                case, steps=[*case.steps[:i], replace(step, context=""), *case.steps[i + 1 :]]
            )


def smaller_sources(source: Source) -> Iterator[Source]:
    for name in ("decorators", "body", "members", "init"):
        for nodes in without_one(getattr(source, name)):
            yield replace(source, **{name: nodes})
    if source.inner is not None:
        for inner in smaller_sources(source.inner):
            yield replace(source, inner=inner)


def without_one(nodes: list[Node]) -> Iterator[list[Node]]:
    for i in reversed(range(len(nodes))):
        node, before, after = nodes[i], nodes[:i], nodes[i + 1 :]
        yield [*before, *after]
        if not isinstance(node, str):
            yield [*before, *node[1], *after]
            for inner in without_one(node[1]):
                yield [*before, (node[0], inner), *after]


def shrunk(case: Case, kind: str) -> tuple[Case, Difference]:
    """A small case with a difference of this kind."""
    found = run_case(case).difference
    if found is None:
        return case, Difference(kind, f"{kind}, but only after the cases before it")
    at, is_new = 0, False
    while True:
        options = list(smaller(case))
        if at == len(options):
            if not is_new:
                return case, found
            at, is_new = 0, False
            continue
        try:
            difference = run_case(options[at]).difference
        except SyntaxError:
            difference = None
        if difference is not None and difference.kind == kind:
            # What was behind it has its place now.
            case, found, is_new = options[at], difference, True
        else:
            at += 1


def run_seed(seed: int) -> int:
    fused = calls = 0
    source: Source | None = None
    for number in range(CASES_A_SEED):
        rng = random.Random(f"{seed} {number}")
        case = random_case(rng, source if number % CASES_A_SOURCE else None)
        source = case.source
        outcome = run_case(case)
        if outcome.difference is not None:
            small, difference = shrunk(case, outcome.difference.kind)
            raise AssertionError(f"case {number}: {difference.text}\n{small}")
        fused += outcome.fused
        calls += outcome.calls
    assert fused >= LEAST_FUSED, f"only {fused} of {CASES_A_SEED} models had something fused"
    return calls
