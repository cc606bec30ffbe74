"""Values of any kind at any place where Python ops and fusions return or save something."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import transformer_ops as tops

from .errors import EXPECTED, assert_clear
from .report import about_to

ISOLATED = True

MODELS, CASES = 4, 25
ROWS, WIDTH = 3, 8


# ---- what may be returned or saved instead of a tensor


class Subclass(Tensor):
    """Intercepts torch functions, as any subclass does by default."""


class Wrapper(Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*given, **(kwargs or {}))


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    copy.untyped_storage().resize_(0)
    return copy


def with_history(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        return tensor.detach().clone().requires_grad_() * 1


def quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.detach().float(), 0.1, 0, torch.qint8)


def raises() -> Iterator[Tensor]:
    yield torch.ones(1)
    raise ValueError("[values] the iterator must end, got an error")


# Each makes a value from the tensor that would be right, which may be None.
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 3,
    lambda: -(2**70),
    lambda: 2.5,
    lambda: float("nan"),
    lambda: 1j,
    lambda: True,
    lambda: "text",
    lambda: b"bytes",
    lambda: (),
    list,
    dict,
    lambda: {"a": torch.ones(2)},
    lambda: {torch.ones(2)},
    lambda: lambda: 3,
    lambda: object(),
    lambda: Tensor,
    lambda: torch.float32,
    lambda: torch.ones(2).numpy(),
    lambda: Mock(spec=Tensor),
    lambda: nn.Linear(2, 2),
    lambda: raises(),
    lambda: (torch.ones(2), (torch.ones(2), 3)),
    lambda: [None, None, None],
)
FROM_TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.detach().double(),
    lambda t: t.detach().half(),
    lambda t: t.detach().bfloat16(),
    lambda t: t.detach().long(),
    lambda t: t.detach() > 0,
    lambda t: t.detach().to(torch.complex64),
    lambda t: t.detach().to("meta"),
    lambda t: t.detach().to_sparse(),
    lambda t: t.detach().to_mkldnn(),
    lambda t: torch.nested.nested_tensor([t.detach(), t.detach()]),
    quantized,
    freed,
    with_history,
    lambda t: nn.Parameter(t.detach().clone()),
    lambda t: t.detach().clone().as_subclass(Subclass),
    lambda t: Wrapper(t.detach()),
    lambda t: t.detach().t() if t.dim() == 2 else t.detach()[None],
    lambda t: t.detach()[..., :-1] if t.dim() else t.detach(),
    lambda t: t.detach()[:0] if t.dim() else t.detach(),
    lambda t: t.detach()[None],
    lambda t: t.detach().flatten(),
    lambda t: t.detach().sum(),
    lambda t: t.detach().new_zeros(()).expand(t.shape),
    lambda t: t.detach().new_empty(1).expand(7, 11),
    lambda t: torch.empty(t.shape, dtype=torch.complex64).conj().imag,
    lambda t: t.detach().clone().requires_grad_(),
    lambda t: (t, t),
    lambda t: [t],
    lambda t: nn.parameter.UninitializedParameter(),
)


def draw(rng: random.Random, right: Any) -> tuple[str, Any]:
    if isinstance(right, tuple | list) and rng.random() < 0.7:
        # The wrong count, or a wrong value at one place.
        items = list(right)
        place = rng.randrange(len(items) + 1)
        kind = rng.choice(["drop", "add", "replace"])
        if kind == "drop" and items:
            del items[place % len(items)]
            return f"{kind} {place}", tuple(items)
        other = items[place % len(items)] if items else None
        text, value = draw(rng, other)
        if kind == "add" or not items:
            items.insert(place, value)
        else:
            items[place % len(items)] = value
        return f"{kind} {place}: {text}", tuple(items)
    if isinstance(right, Tensor) and rng.random() < 0.6:
        which = rng.randrange(len(FROM_TENSORS))
        return f"FROM_TENSORS[{which}]", FROM_TENSORS[which](right)
    which = rng.randrange(len(OTHERS))
    return f"OTHERS[{which}]", OTHERS[which]()


class Script:
    """Replaces the value at one place of one call."""

    def __init__(self) -> None:
        self.place, self.done, self.rng = "", "", random.Random(0)

    def __call__(self, place: str, right: Any) -> Any:
        if place != self.place or self.done:
            return right
        text, value = draw(self.rng, right)
        self.done = f"{place}: {text}"
        about_to(self.done)
        return value


SCRIPT = Script()
PLACES = ("output", "extra", "whole", "saved", "save", "attribute")
PLACES += ("grad_input", "grad_parameters", "grad_extra", "grads")


# ---- the ops, which are right if no value is replaced


class Split(tops.BasicOperation):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def op_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        output = SCRIPT("output", input_ * self.weight + self.bias)
        return SCRIPT("whole", (output, SCRIPT("saved", (input_, self.weight))))

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, saved: Any, **unused: Any) -> None:
        ctx.save_for_backward(*SCRIPT("save", saved))
        ctx.own = SCRIPT("attribute", (input_,))

    def op_backward(self, ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = (grad * x).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)
        parameters = SCRIPT("grad_parameters", (of_weight, of_bias))
        return SCRIPT("grads", (SCRIPT("grad_input", grad * weight), parameters))


class Single(Split):
    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Any:
        ctx.save_for_backward(*SCRIPT("save", (input_, self.weight)))
        if SCRIPT.place == "saved":
            ctx.to_save = SCRIPT("saved", ctx.to_save)
        ctx.own = SCRIPT("attribute", (input_,))
        return SCRIPT("output", input_ * self.weight + self.bias)


class Gate(tops.BasicOperation):
    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        ((gate,),) = basic_op_extra_inputs
        ctxs[0].save_for_backward(*SCRIPT("save", (input_, gate)))
        output, extra = SCRIPT("output", input_ * gate), SCRIPT("extra", [(input_ + 1,)])
        return SCRIPT("whole", (output, extra))

    def fuser_backward(self, ctxs: Any, grad: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        x, gate = ctxs[0].saved_tensors
        ((of_extra,),) = basic_op_grad_extra_outputs
        of_input = grad * gate if of_extra is None else grad * gate + of_extra
        of_gate = SCRIPT("grad_extra", [(grad * x,)])
        of_parameters = SCRIPT("grad_parameters", [()])
        return SCRIPT("grads", (SCRIPT("grad_input", of_input), of_parameters, of_gate))


class FusedForward(tops.FusedOperation):
    """LayerNorm, Linear and SiLU, whose own backward reads the slots."""

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        norm, product, _ = self.basic_ops
        x = input_.detach().float()
        mean, rstd = x.mean(-1), (x.var(-1, unbiased=False) + norm.eps).rsqrt()
        y = ((x - mean[..., None]) * rstd[..., None]).to(input_.dtype) * norm.weight + norm.bias
        hidden = y @ product.weight.T
        saved = SCRIPT("saved", (input_, mean, rstd, y, product.weight, hidden))
        output, extra = SCRIPT("output", silu(hidden)), SCRIPT("extra", [(), (), ()])
        return SCRIPT("whole", (output, extra, saved))

    def fuser_forward_save_ctx(self, ctxs: Any, input_: Tensor, saved: Any, **unused: Any) -> None:
        saved = SCRIPT("save", tuple(saved))
        ctxs[0].save_for_backward(*saved[:3])
        ctxs[1].save_for_backward(*saved[3:5])
        ctxs[2].save_for_backward(*saved[5:])
        ctxs[2].own = SCRIPT("attribute", (input_,))


class FusedBackward(tops.FusedOperation):
    def fuser_backward(self, ctxs: Any, grad: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        (x, weight), (hidden,) = ctxs[0].saved_tensors, ctxs[1].saved_tensors
        s = torch.sigmoid(hidden)
        grad = grad * s * (1 + hidden * (1 - s))
        of_weight = None if x is None else grad.flatten(0, -2).T @ x.flatten(0, -2)
        of_input = None if weight is None else grad @ weight
        parameters = SCRIPT("grad_parameters", [(of_weight,), ()])
        of_extra = SCRIPT("grad_extra", [(), ()])
        return SCRIPT("grads", (SCRIPT("grad_input", of_input), parameters, of_extra))


class Joint(FusedBackward):
    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        weight = self.basic_ops[0].weight
        hidden = input_ @ weight.T
        ctxs[0].save_for_backward(*SCRIPT("save", (input_, weight)))
        ctxs[1].save_for_backward(*SCRIPT("saved", (hidden,)))
        output, extra = SCRIPT("output", silu(hidden)), SCRIPT("extra", [(), ()])
        return SCRIPT("whole", (output, extra))


PRODUCT = [tops.BasicLinear, tops.SiLU]
FUSIONS: dict[str, tuple[Callable[..., Any], Any, list[Any]]] = {
    "forward": (tops.register_forward_fusion, FusedForward, [tops.LayerNorm, *PRODUCT]),
    "backward": (tops.register_backward_fusion, FusedBackward, PRODUCT),
    "joint": (tops.register_forward_backward_fusion, Joint, PRODUCT),
    "none": (tops.register_forward_fusion, FusedForward, [Split, Split, Split]),
}


class Case:
    """A model with a step in Python between native ones, and how it is called."""

    def __init__(self, rng: random.Random) -> None:
        self.fusion = rng.choice(list(FUSIONS))
        own = [Split, Single, Gate] if self.fusion == "none" else [tops.Identity]
        middle = [rng.choice(own)()]
        self.has_extra = isinstance(middle[0], Gate)
        before = [tops.Linear(WIDTH, WIDTH)] * (rng.random() < 0.7)
        after = rng.choice([[tops.Linear(WIDTH, WIDTH)], [tops.Dropout(0.2), tops.GELU()], []])
        block = [tops.LayerNorm(WIDTH), tops.Linear(WIDTH, WIDTH, bias=False), tops.SiLU()]
        layers = [*before, *(block if self.fusion != "none" else []), *middle, *after]
        self.module = tops.Sequential(*layers, recompute=rng.choice(["none", "cheap"]))
        self.autocast = rng.random() < 0.25
        self.grad = rng.random() < 0.9
        shape = rng.choice([(ROWS, WIDTH), (2, ROWS, WIDTH), (0, WIDTH)])
        self.inputs = [torch.randn(shape).requires_grad_(rng.random() < 0.7)]
        if self.has_extra:
            self.inputs.append(torch.randn(shape).requires_grad_())
        for parameter in self.module.parameters():
            parameter.requires_grad_(rng.random() < 0.9)

    def __str__(self) -> str:
        flags = f"autocast {self.autocast}, grad {self.grad}"
        shape = tuple(self.inputs[0].shape)
        return f"{self.module}\nfusion {self.fusion}, {flags}, input {shape}: {SCRIPT.done}"

    def registered(self) -> AbstractContextManager[Any]:
        register, fusion, pattern = FUSIONS[self.fusion]
        return register(fusion, pattern=pattern)

    def run(self) -> None:
        with torch.set_grad_enabled(self.grad):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                outputs = self.module(*self.inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [o for o in outputs if o.requires_grad and o.is_floating_point()]
            if wanted and self.grad:
                loss = torch.stack([output.float().sum() for output in wanted]).sum()
                loss.backward()


def is_own(error: Exception) -> bool:
    """Whether a method above failed itself, as it may in any way on what it saved."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("stand_ins.py", f"{Path(torch.__file__).parent}")
    own = [f for f in frames if not any(part in f.filename for part in others)]
    return own[-1].filename == __file__ and own[-1].name != "run"


def check(case: Case, rng: random.Random) -> int:
    SCRIPT.place, SCRIPT.done, SCRIPT.rng = rng.choice(PLACES), "", rng
    about_to(str(case))
    try:
        case.run()
    except Exception as error:
        if not SCRIPT.done:
            raise AssertionError(f"an error without a wrong value: {error!r}\n{case}") from error
        if not is_own(error):
            assert_clear(error, str(case))
            assert str(error).startswith("["), f"an unnamed error: {error!r}\n{case}"
    finally:
        SCRIPT.place = ""
    try:
        case.run()
    except EXPECTED as error:
        raise AssertionError(f"broken afterwards: {error!r}\n{case}") from error
    return int(bool(SCRIPT.done))


# ---- what registers fusions and rules, and what their functions return


def use(func: Any, **arguments: Any) -> None:
    given = {"pattern": PRODUCT} | arguments
    with tops.register_forward_fusion(func, **given):
        tops.Sequential(tops.Linear(WIDTH, WIDTH, bias=False), tops.SiLU())(torch.ones(2, WIDTH))


def use_rule(**arguments: Any) -> None:
    given = {"name": "drawn", "statements": "H = torch.relu(H)", "make": lambda *_: [tops.ReLU()]}
    tops.register_fuse_rule(**(given | arguments)).remove()


SITES: dict[str, Callable[[Any], Any]] = {
    "pattern": lambda value: use(Joint, pattern=value),
    "entry": lambda value: use(Joint, pattern=[tops.BasicLinear, value]),
    "alternative": lambda value: use(Joint, pattern=[tops.BasicLinear, (tops.SiLU, value)]),
    "optional": lambda value: tops.optional(value),
    "func": use,
    "func of a list": lambda value: use(value, pattern=None),
    "name": lambda value: use(Joint, name=value),
    "prepend": lambda value: use(Joint, prepend=value),
    "guard": lambda value: use(Joint, guard=value),
    "result of a guard": lambda value: use(Joint, guard=lambda ops: value),
    "result of a function": lambda value: use(lambda ops: value),
    "result of a function of a list": lambda value: use(lambda ops, **_: value, pattern=None),
    "item of a list": lambda value: use(lambda ops, **_: [*ops[:-1], value], pattern=None),
    "basic ops": lambda value: Joint(value),
    "name of a rule": lambda value: use_rule(name=value),
    "statements": lambda value: use_rule(statements=value),
    "a text of statements": lambda value: use_rule(statements=["H = torch.relu(H)", value]),
    "make": lambda value: use_rule(make=value),
    "method": lambda value: use_rule(method=value),
    "when": lambda value: use_rule(when=value),
    "rules": lambda value: tops.fuse(nn.Linear(2, 2), rules=value),
}


def check_site(rng: random.Random) -> int:
    site, (text, value) = rng.choice(list(SITES)), draw(rng, torch.ones(2, 3))
    about_to(f"{site}: {text}")
    try:
        SITES[site](value)
    except Exception as error:
        if not is_own(error):
            assert_clear(error, f"{site}: {text}")
            assert str(error).startswith("["), f"an unnamed error: {error!r}\n{site}: {text}"
    return 1


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = 0
    for _ in range(MODELS):
        case = Case(rng)
        # A change of the registry makes plans stale, so one registration serves all.
        with case.registered():
            count += sum(check(case, rng) for _ in range(CASES))
    return count + sum(check_site(rng) for _ in range(CASES))
