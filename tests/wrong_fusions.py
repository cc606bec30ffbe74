"""Fusions that are wrong in one way each. `check_fusion` has to refuse every one."""

from __future__ import annotations

import gc
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from user_fusions import replacing, rows, silu_gradient

import transformer_ops as tops

OPS = torch.ops.transformer_ops
X = torch.linspace(-1, 1, 24).reshape(4, 6).sin() * 2


class Row(NamedTuple):
    """`message` is a part of the error, or empty."""

    name: str
    kind: str
    fused: Callable[..., Any]
    pattern: list[Any] | None
    make: Callable[[], list[Any]]
    message: str
    extra_inputs: tuple[Tensor, ...] = ()


# ---- what is right


class Slots(tops.FusedOperation):
    """Forward: Linear + SiLU."""

    def output(self, x: Tensor, weight: Tensor, hidden: Tensor) -> Any:
        return silu(hidden)

    def slots(self, x: Tensor, weight: Tensor, hidden: Tensor) -> Any:
        return x, weight, hidden

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        weight = self.basic_ops[0].weight
        hidden = input_ @ weight.T
        slots = self.slots(input_, weight, hidden)
        return self.output(input_, weight, hidden), [(), ()], slots

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        x, weight, hidden = tensors_to_save
        basic_op_ctxs[0].save_for_backward(x, weight)
        basic_op_ctxs[1].save_for_backward(hidden)


class Grads(tops.FusedOperation):
    """Backward: Linear + SiLU."""

    def derivative(self, grad: Tensor, hidden: Tensor) -> Tensor:
        return silu_gradient(grad, hidden)

    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor | None) -> Any:
        grad_weight = None if x is None else rows(grad).T @ rows(x)
        return None if weight is None else grad @ weight, [(grad_weight,), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        x, weight = basic_op_ctxs[0].saved_tensors
        (hidden,) = basic_op_ctxs[1].saved_tensors
        return *self.gradients(self.derivative(grad_output, hidden), x, weight), [(), ()]


class Joint(tops.FusedOperation):
    """Joint: Linear with bias + SiLU, which computes the product again."""

    def product(self, x: Tensor) -> Tensor:
        return linear(x, self.basic_ops[0].weight, self.basic_ops[1].bias)

    def output(self, x: Tensor) -> Tensor:
        return silu(self.product(x))

    def saved(self, x: Tensor) -> Any:
        return x, self.basic_ops[0].weight, self.basic_ops[1].bias

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        grad = silu_gradient(grad, linear(x, weight, bias))
        return grad @ weight, rows(grad).T @ rows(x), rows(grad).sum(0)

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        return self.output(input_), [(), (), ()], self.saved(input_)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        found = self.gradients(grad_output, *basic_op_ctxs[0].saved_tensors)
        grad, grad_weight, grad_bias = found
        return grad, [(grad_weight,), (grad_bias,), ()], [(), (), ()]


class Fork(tops.FusedOperation):
    """Joint: MakeExtraOutput + ConstantScale + AddExtraInput: `2 x + extra`, and x."""

    def outputs(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.basic_ops[1].scale + extra, x.clone()

    def gradients(self, scale: float, grad: Tensor, grad_extra: Tensor) -> tuple[Any, Any]:
        return grad * scale + grad_extra, grad

    def fuser_forward_compute(
        self, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        output, extra = self.outputs(input_, basic_op_extra_inputs[2][0])
        return output, [(extra,), (), ()], ()

    def fuser_forward_save_ctx(self, *unused: Any, **keywords: Any) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        scale = basic_op_ctxs[1].attributes["scale"]
        grad, grad_extra = self.gradients(scale, grad_output, basic_op_grad_extra_outputs[0][0])
        return grad, [(), (), ()], [(), (), (grad_extra,)]


class Scales(tops.FusedOperation):
    """Joint: ConstantScale + SiLU + ConstantScale."""

    def output(self, x: Tensor, first: float, second: float) -> Tensor:
        return silu(x * first) * second

    def gradient(self, grad: Tensor, x: Tensor, first: float, second: float) -> Tensor:
        return silu_gradient(grad * second, x * first) * first

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        first, _, second = self.basic_ops
        return self.output(input_, first.scale, second.scale), [(), (), ()], (input_,)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        (x,) = basic_op_ctxs[0].saved_tensors
        first, second = (basic_op_ctxs[i].attributes["scale"] for i in (0, 2))
        return self.gradient(grad_output, x, first, second), [()] * 3, [()] * 3


class NormSlots(tops.FusedOperation):
    """Forward: RMSNorm + SiLU."""

    def slot(self, rstd: Tensor, x: Tensor) -> Tensor:
        return rstd

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        norm = self.basic_ops[0]
        wide = input_.to(torch.promote_types(input_.dtype, torch.float32))
        rstd = self.slot((wide.square().mean(-1) + norm.eps).rsqrt(), input_)
        gamma = norm.weight.to(wide) + norm.zero_centered_gamma
        output = (wide * rstd[..., None] * gamma).to(input_)
        return silu(output), [(), ()], (input_, rstd, output)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        *of_norm, output = tensors_to_save
        basic_op_ctxs[0].save_for_backward(*of_norm)
        basic_op_ctxs[1].save_for_backward(output)


class NormGrads(tops.FusedOperation):
    """Backward: MakeExtraOutput + RMSNorm. No slot has gamma, so it is read from the op."""

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        x, rstd = basic_op_ctxs[1].saved_tensors
        attributes, weight = basic_op_ctxs[1].attributes, self.basic_ops[1].weight
        gamma = weight.to(rstd) + attributes["zero_centered_gamma"]
        normalized, grad = x.to(rstd) * rstd[..., None], grad_output.to(rstd)
        grad_weight = rows(grad * normalized).sum(0)
        grad = grad * gamma
        grad = rstd[..., None] * (grad - normalized * (grad * normalized).mean(-1, keepdim=True))
        grad_input = (grad + basic_op_grad_extra_outputs[0][0]).to(x)
        return grad_input, [(), (grad_weight,)], [(), ()]


class Typed(tops.FusedOperation):
    """Joint: ConstantScale + an op of `extra` extra inputs, by the typed ops of that one."""

    def output(self, x: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def gradients(self, attributes: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def fuser_forward_compute(
        self, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        output, saved = self.output(input_ * self.basic_ops[0].scale, *basic_op_extra_inputs[1])
        return output, [(), ()], saved

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        scale, op = (ctx.attributes for ctx in basic_op_ctxs)
        grad, parameters = self.gradients(op, grad_output, *basic_op_ctxs[0].saved_tensors)
        extra = (None,) * self.basic_ops[1].num_extra_inputs
        return grad * scale["scale"], [(), parameters], [(), extra]


class Rotated(Typed):
    """RoPE of tables that get no gradient."""

    def output(self, x: Tensor, *tables: Tensor) -> tuple[Tensor, Any]:
        op = self.basic_ops[1]
        return OPS.rope(x, *tables, op.head_dim, None, op.by_head, op.interleaved, None), tables

    def gradients(self, attributes: Any, grad: Tensor, *tables: Tensor) -> tuple[Tensor, Any]:
        a = attributes
        flags = (a["by_head"], a["interleaved"])
        return OPS.rope_backward(grad, *tables, a["head_dim"], None, *flags, None), ()


class Adapted(Typed):
    """LoRALinear, whose scaling is a tuple."""

    def scaling(self, attributes: Any) -> Any:
        return attributes["scaling"]

    def output(self, x: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
        op = self.basic_ops[1]
        w, a, b = op.weight0, op.lora_a0, op.lora_b0
        options = ([8], [0], self.scaling(vars(op)), op.p, op.training, True)
        x = x.to(w.dtype)
        output, *kept = OPS.lora_linear(x, [w], [], [a], [b], *options)
        return output, (x, *kept, w, a, b)

    def gradients(self, attributes: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Any]:
        lists = ([tensor.to(grad.dtype)] for tensor in saved[3:])
        options = ([8], [0], self.scaling(attributes), attributes["p"])
        wanted = [True, True, False, True, True]
        grad, *found = OPS.lora_linear_backward(grad, *saved[:3], *lists, *options, wanted)
        return grad, [tensor for tensors in found for tensor in tensors]


class Grouped(Typed):
    """GroupedLinear."""

    def splits(self, splits: Tensor) -> Tensor:
        return splits

    def output(self, x: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
        splits, weights = self.splits(*extra), list(self.basic_ops[1].parameters())
        x = x.to(weights[0].dtype)
        output = OPS.grouped_linear(x, splits, weights, [], None, False, False)
        return output, (x, splits, *weights)

    def gradients(self, attributes: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Any]:
        x, splits, *weights = saved
        weights = [weight.to(grad.dtype) for weight in weights]
        wanted = [True, True, False, False]
        return OPS.grouped_linear_backward(
            grad, x, splits, weights, [], None, False, False, wanted
        )[:2]


def mlp() -> list[Any]:
    return [tops.LayerNorm(6), tops.Linear(6, 8, bias=False), tops.SiLU(), tops.Linear(8, 6)]


def with_bias() -> list[Any]:
    ops = [tops.LayerNorm(6), tops.Linear(6, 8), tops.SiLU(), tops.Linear(8, 6)]
    nn.init.normal_(ops[1].bias)
    return ops


def fork() -> list[Any]:
    return [tops.SiLU(), tops.MakeExtraOutput(), tops.ConstantScale(2.0), tops.AddExtraInput()]


def lora() -> list[Any]:
    op = tops.LoRALinear(6, 8, 2, scaling=0.5, bias=False).requires_grad_()
    nn.init.normal_(op.lora_b0)
    return [tops.ConstantScale(2.0), op]


PATTERNS: dict[str, tuple[str, list[Any], Callable[[], list[Any]], tuple[Tensor, ...]]] = {
    "Slots": ("forward", [tops.BasicLinear, tops.SiLU], mlp, ()),
    "Grads": ("backward", [tops.BasicLinear, tops.SiLU], mlp, ()),
    "Joint": ("forward_backward", [tops.BasicLinear, tops.Bias, tops.SiLU], with_bias, ()),
    "Scales": (
        "forward_backward",
        [tops.ConstantScale, tops.SiLU, tops.ConstantScale],
        lambda: [tops.ConstantScale(0.5), tops.SiLU(), tops.ConstantScale(0.5)],
        (),
    ),
    "NormSlots": (
        "forward",
        [tops.RMSNorm, tops.SiLU],
        lambda: [tops.Linear(6, 7), tops.RMSNorm(7, eps=1e-5), tops.SiLU(), tops.Linear(7, 5)],
        (),
    ),
    "NormGrads": (
        "backward",
        [tops.MakeExtraOutput, tops.RMSNorm],
        lambda: [tops.Linear(6, 7), tops.MakeExtraOutput(), tops.RMSNorm(7), tops.Linear(7, 5)],
        (),
    ),
    "Fork": (
        "forward_backward",
        [tops.MakeExtraOutput, tops.ConstantScale, tops.AddExtraInput],
        fork,
        (X.cos(),),
    ),
    "Rotated": (
        "forward_backward",
        [tops.ConstantScale, tops.RoPE],
        lambda: [tops.Linear(6, 18), tops.ConstantScale(2.0), tops.RoPE(6)],
        (X.cos(), X.sin()),
    ),
    "Adapted": ("forward_backward", [tops.ConstantScale, tops.LoRALinear], lora, ()),
    "Grouped": (
        "forward_backward",
        [tops.ConstantScale, tops.GroupedLinear],
        lambda: [tops.ConstantScale(2.0), tops.GroupedLinear(2, 6, 8, bias=False)],
        (torch.tensor([3, 1]),),
    ),
}
RIGHT = [Slots, Grads, Joint, Fork, Scales, NormSlots, NormGrads, Rotated, Adapted, Grouped]


def wrong(name: str, base: type, message: str = "differs from the unfused ops", **methods: Any):
    """A row with a subclass that has these methods."""
    kind, pattern, make, extra_inputs = PATTERNS[base.__name__]
    return Row(name, kind, type("Wrong", (base,), methods), pattern, make, message, extra_inputs)


# ---- what is wrong


def eagerly(setting: Callable[[], Any], output: Tensor) -> Tensor:
    """The output, after the setting has been made in eager mode."""
    torch.compiler.is_compiling() or setting()
    return output


def slots() -> Iterator[Row]:
    """A slot, for the backward of the ops themselves."""
    changed: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
        "input of zeros": lambda x, w, h: (torch.zeros_like(x), w, h),
        "input doubled": lambda x, w, h: (2 * x, w, h),
        "input rounded": lambda x, w, h: (x.half().to(x), w, h),
        "input of the first rows": lambda x, w, h: (x * (torch.arange(len(x)) < 2)[:, None], w, h),
        "weight of zeros": lambda x, w, h: (x, torch.zeros_like(w), h),
        "weight's sign": lambda x, w, h: (x, -w, h),
        "hidden for the output": lambda x, w, h: (x, w, silu(h)),
        "hidden without sign": lambda x, w, h: (x, w, h.abs()),
        "hidden of ones": lambda x, w, h: (x, w, torch.ones_like(h)),
        "hidden shifted": lambda x, w, h: (x, w, h + 1e-3),
    }
    for name, function in changed.items():
        yield wrong(name, Slots, slots=lambda self, *given, f=function: f(*given))
    raising: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
        "weight transposed": lambda x, w, h: (x, w.T, h),
        "slots swapped": lambda x, w, h: (h, w, x),
        "input missing": lambda x, w, h: (None, w, h),
        "hidden of one row": lambda x, w, h: (x, w, h[:1]),
    }
    for name, function in raising.items():
        yield wrong(name, Slots, "", slots=lambda self, *given, f=function: f(*given))


def outputs() -> Iterator[Row]:
    """The output of a forward fusion."""
    methods: dict[str, Callable[..., Tensor]] = {
        "a factor": lambda self, x, w, h: silu(h) * 1.001,
        "another activation": lambda self, x, w, h: nn.functional.gelu(h),
        "float32 inside": lambda self, x, w, h: silu(h.float()).to(h),
        "always float32": lambda self, x, w, h: silu(h).float(),
        "not if compiled": lambda self, x, w, h: silu(h) + (type(h) is not Tensor),
        "not in eval": lambda self, x, w, h: silu(h) * (1 + (not self.basic_ops[0].training)),
        "at least two rows": lambda self, x, w, h: silu(h).squeeze(0),
        "rows flattened": lambda self, x, w, h: rows(silu(h)),
        "two dimensions": lambda self, x, w, h: silu((w @ x.transpose(0, -1)).transpose(0, -1)),
        "input of one layout": lambda self, x, w, h: silu(x.view(-1, 6) @ w.T).view(h.shape),
        "a mean of rows": lambda self, x, w, h: silu(h) * (len(rows(h)) // len(rows(h))),
        "clamped": lambda self, x, w, h: silu(h.clamp(min=-0.2)),
    }
    for name, method in methods.items():
        yield wrong(f"output: {name}", Slots, "", output=method)

    def in_place(self: Any, x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        x.detach().clamp_(min=0)
        return silu(h)

    yield wrong("output: input changed in place", Slots, "", output=in_place)

    def without_grad(self: Any, input_: Tensor, *, requires_grad: list[bool], **unused: Any) -> Any:
        output, extra, saved = Slots.fuser_forward_compute(self, input_)
        return output + (not any(requires_grad)), extra, saved

    yield wrong("output: without grad", Slots, "", fuser_forward_compute=without_grad)
    cached: dict[str, Any] = {}

    def by_shape(self: Any, x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        return cached.setdefault(f"{h.shape} {h.dtype}", silu(h).detach().clone()).clone()

    yield wrong("output: cached by shape", Slots, "", output=by_shape)

    def cached_weight(self: Any, x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        if getattr(self, "_copy", w).dtype != w.dtype or "_copy" not in self.__dict__:
            self.__dict__["_copy"] = w.detach().clone()
        return silu(x @ self.__dict__["_copy"].T)

    yield wrong("output: weight cached", Slots, "after an optimizer step", output=cached_weight)


def gradients() -> Iterator[Row]:
    """The gradients of a backward fusion."""
    derivatives: dict[str, Callable[..., Tensor]] = {
        "of ReLU": lambda self, grad, h: grad * (h > 0),
        "without the product rule": lambda self, grad, h: grad * torch.sigmoid(h),
        "in 16 bits": lambda self, grad, h: silu_gradient(grad, h).half().to(grad),
        "in float32": lambda self, grad, h: silu_gradient(grad.float(), h.float()).to(grad),
        "in place": lambda self, grad, h: grad.mul_(silu_gradient(torch.ones_like(h), h)),
        "saved in place": lambda self, grad, h: silu_gradient(grad, h) + 0 * h.mul_(0.5),
        "of one layout": lambda self, grad, h: silu_gradient(grad.view(-1), h.reshape(-1)).view(
            h.shape
        ),
    }
    for name, method in derivatives.items():
        yield wrong(f"derivative: {name}", Grads, "", derivative=method)
    grads: dict[str, Callable[..., Any]] = {
        "weight transposed": lambda g, x, w: (g @ w, [((rows(x).T @ rows(g)),), ()]),
        "weight's is None": lambda g, x, w: (None if w is None else g @ w, [(None,), ()]),
        "input's is None": lambda g, x, w: (None, [(x if x is None else rows(g).T @ rows(x),), ()]),
        "a slot is None": lambda g, x, w: (g @ w, [(rows(g).T @ rows(x),), ()]),
        "two dimensions": lambda g, x, w: (
            None if w is None else g @ w,
            [(x if x is None else g.T @ x,), ()],
        ),
        "a mean": lambda g, x, w: (
            None if w is None else g @ w,
            [(x if x is None else rows(g).T @ rows(x) / len(rows(x)),), ()],
        ),
        "one too many": lambda g, x, w: (None if w is None else g @ w, [(None, None), ()]),
        "none of frozen": lambda g, x, w: (
            None if w is None or x is None else g @ w,
            [(x if x is None else rows(g).T @ rows(x),), ()],
        ),
    }
    for name, function in grads.items():
        yield wrong(f"gradient: {name}", Grads, "", gradients=lambda self, *a, f=function: f(*a))


def joints() -> Iterator[Row]:
    """Fusions of both passes, with a bias."""
    right = Joint.gradients
    changed: dict[str, Callable[..., Any]] = {
        "a factor": lambda self, g, x, w, b: [1.01 * grad for grad in right(self, g, x, w, b)],
        "bias missing": lambda self, g, x, w, b: (*right(self, g, x, w, b)[:2], None),
        "bias of the output": lambda self, g, x, w, b: (
            *right(self, g, x, w, b)[:2],
            rows(g).sum(0),
        ),
        "bias of one row": lambda self, g, x, w, b: (
            *right(self, g, x, w, b)[:2],
            silu_gradient(rows(g)[-1:], linear(rows(x)[-1:], w, b)).sum(0),
        ),
        "product without bias": lambda self, g, x, w, b: right(self, g, x, w, 0 * b),
        "frozen weight": lambda self, g, x, w, b: (
            right(self, g, x, w, b)
            if w.requires_grad or self.basic_ops[0].weight.requires_grad
            else (None, None, rows(g).sum(0))
        ),
        "frozen bias": lambda self, g, x, w, b: right(
            self, g, x, w, b if self.basic_ops[1].bias.requires_grad else 0 * b
        ),
    }
    for name, method in changed.items():
        yield wrong(f"joint: {name}", Joint, "", gradients=method)
    unsaved: dict[str, Callable[..., Any]] = {
        "weight unsaved": lambda self, g, x, b: right(self, g, x, self.basic_ops[0].weight, b),
        "bias unsaved": lambda self, g, x, w: right(self, g, x, w, self.basic_ops[1].bias),
    }
    for k, (name, method) in enumerate(unsaved.items(), start=1):

        def saved(self: Any, x: Tensor, k: int = k) -> Any:
            return [t for i, t in enumerate(Joint.saved(self, x)) if i != k]

        yield wrong(f"joint: {name}", Joint, "must be saved", gradients=method, saved=saved)

    def keeps(self: Any, x: Tensor) -> Tensor:
        self.__dict__["_hidden"] = self.product(x)
        return silu(self.__dict__["_hidden"])

    def reads(self: Any, grad: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
        grad = silu_gradient(grad, self.__dict__["_hidden"])
        return grad @ w, rows(grad).T @ rows(x), rows(grad).sum(0)

    yield wrong("joint: state in the op", Joint, "another call", output=keeps, gradients=reads)

    yield wrong(
        "joint: bias forgotten if the weight is first",
        Joint,
        "",
        gradients=lambda self, g, x, w, b: (
            right(self, g, x, w, b)[0],
            right(self, g, x, w, b)[1],
            right(self, g, x, w, b)[2] if self.basic_ops[0].weight.requires_grad else None,
        ),
    )


def forks() -> Iterator[Row]:
    """Extra tensors."""
    outputs: dict[str, Callable[..., Any]] = {
        "extra input ignored": lambda self, x, extra: (x * 2, x.clone()),
        "extra output scaled": lambda self, x, extra: (x * 2 + extra, x * 2),
        "scale fixed": lambda self, x, extra: (x * 3 + extra, x.clone()),
        "extra input in place": lambda self, x, extra: (extra.detach().add_(x * 2), x.clone()),
    }
    for name, method in outputs.items():
        yield wrong(f"extra: {name}", Fork, "", outputs=method)

    def shared(self: Any, x: Tensor, extra: Tensor) -> Any:
        both = torch.stack([x * 2 + extra, x])
        return both[0], both[1]

    yield wrong("extra: shared memory", Fork, "memory of its own", outputs=shared)
    grads: dict[str, Callable[..., Any]] = {
        "extra output's gradient ignored": lambda self, s, g, extra: (g * 2, g),
        "extra output's gradient alone": lambda self, s, g, extra: (extra, g),
        "extra input's gradient missing": lambda self, s, g, extra: (g * 2 + extra, None),
        "extra input's gradient scaled": lambda self, s, g, extra: (g * 2 + extra, 2 * g),
        "extra gradient in place": lambda self, s, g, extra: (extra.add_(2 * g), g),
    }
    for name, method in grads.items():
        yield wrong(f"extra: {name}", Fork, "", gradients=method)


def unsaved() -> Iterator[Row]:
    """Tensors that backward reads behind the back of autograd, and numbers that are fixed."""

    def without_versions(self: Any, x: Tensor) -> Any:
        return x.data, self.basic_ops[0].weight, self.basic_ops[1].bias

    yield wrong("unsaved: the input's data", Joint, "must be saved", saved=without_versions)

    def own_output(self: Any, x: Tensor) -> Tensor:
        self.__dict__["_output"] = silu(self.product(x))
        return self.__dict__["_output"]

    def reads_output(self: Any, grad: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
        hidden = linear(x, w, b)
        output = self.__dict__["_output"].reshape(hidden.shape)
        grad = silu_gradient(grad, hidden) + (output - silu(hidden))
        return grad @ w, rows(grad).T @ rows(x), rows(grad).sum(0)

    def hides(
        self: Any, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)
        basic_op_ctxs[0].hidden = {"hidden": self.product(input_)}

    message = "got the attribute hidden of a context"
    yield wrong("unsaved: in an attribute", Joint, message, fuser_forward_save_ctx=hides)
    yield wrong("unsaved: the output", Joint, "", output=own_output, gradients=reads_output)

    def fixed(self: Any, x: Tensor, extra: Tensor) -> Any:
        return x * 2 + extra, x.clone()

    yield wrong("extra: a fixed scale", Fork, "attributes of other values", outputs=fixed)

    def assumes(self: Any, scale: float, grad: Tensor, grad_extra: Tensor) -> Any:
        return grad * 2 + grad_extra, grad

    yield wrong("extra: a fixed scale in backward", Fork, "attributes of", gradients=assumes)

    def reads(self: Any, scale: float, grad: Tensor, grad_extra: Tensor) -> Any:
        return grad * self.basic_ops[1].scale + grad_extra, grad

    message = "attributes that backward read"
    yield wrong("extra: the scale is read in backward", Fork, message, gradients=reads)


def numbers() -> Iterator[Row]:
    """What is wrong only for some numbers, sizes, layouts and modes."""
    cache: dict[Any, Tensor] = {}

    def cached(key: Any, tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return tensor
        return cache.setdefault((key, tensor.shape, tensor.dtype), tensor.detach().clone())

    def in_buffer(tensor: Tensor) -> Tensor:
        return tensor if torch.compiler.is_compiling() else cached("", tensor).copy_(tensor)

    outputs: dict[str, Callable[..., Tensor]] = {
        "of the other sign|large inputs": lambda self, x, w, h: h * (h.exp() / (1 + h.exp())),
        "NaN in inputs": lambda self, x, w, h: torch.where(h == h, silu(h), torch.zeros_like(h)),
        "weights that are not contiguous": lambda self, x, w, h: silu(
            x @ w.as_strided(w.shape, (w.shape[1], 1)).T
        ),
        "65 rows": lambda self, x, w, h: torch.cat([silu(h[:64]), 0 * h[64:]]),
        "be contiguous": lambda self, x, w, h: silu((w @ x.mT).mT if x.dim() > 1 else h),
        "inference mode": lambda self, x, w, h: silu(h) + torch.is_inference_mode_enabled(),
        "random state": lambda self, x, w, h: eagerly(lambda: torch.rand(3), silu(h)),
        "the default dtype": lambda self, x, w, h: eagerly(
            lambda: torch.set_default_dtype(torch.float64), silu(h)
        ),
        "the flushing of denormal": lambda self, x, w, h: eagerly(
            lambda: torch.set_flush_denormal(True), silu(h)
        ),
        "another call before backward": lambda self, x, w, h: in_buffer(silu(h)),
        "written through .data": lambda self, x, w, h: silu(
            x @ cached((w.data_ptr(), w._version), w).T
        ),
    }
    for message, method in outputs.items():
        yield wrong(f"numbers: {message}", Slots, message, output=method)
    derivatives: dict[str, Callable[..., Tensor]] = {
        "of the other sign|large inputs": lambda self, g, h: (
            silu_gradient(g, h) * (h.exp() / h.exp())
        ),
        "float16, large gradients": lambda self, g, h: silu_gradient(g * 1024, h) / 1024,
        "NaN in gradients": lambda self, g, h: silu_gradient(g.nan_to_num(), h),
        "gradients of zeros": lambda self, g, h: silu_gradient(g / (m := g.abs().sum()) * m, h),
    }
    for message, method in derivatives.items():
        yield wrong(f"gradient of numbers: {message}", Grads, message, derivative=method)
    right = Joint.gradients
    joints: dict[str, Callable[..., Any]] = {
        "four dimensions": lambda self, g, x, w, b: (
            right(self, g, x, w, b)
            if g.dim() < 4
            else (right(self, g, x, w, b)[0], *right(self, g[0], x[0], w, b)[1:])
        ),
        "thousands of rows": lambda self, g, x, w, b: (
            right(self, g, x, w, b)[0],
            *right(self, rows(g)[:4096], rows(x)[:4096], w, b)[1:],
        ),
        "more than one backward": lambda self, g, x, w, b: (
            *right(self, g, x, w, b)[:2],
            in_buffer(right(self, g, x, w, b)[2]),
        ),
        "training changed": lambda self, g, x, w, b: [
            grad * (1 + (not self.basic_ops[0].training)) for grad in right(self, g, x, w, b)
        ],
    }
    for message, method in joints.items():
        yield wrong(f"numbers of a joint fusion: {message}", Joint, "", gradients=method)


def surroundings() -> Iterator[Row]:
    """What is wrong only in some surroundings, or for two things at once, and what is left
    changed."""
    right = Joint.gradients
    local = threading.local()

    def from_start(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            return x
        return x.new_empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride())

    def in_thread(self: Any, x: Tensor) -> Tensor:
        local.is_set = True
        return silu(self.product(x))

    def own(self: Any, x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        is_kept = type(w) is Tensor or torch.compiler.is_compiling()
        return silu(x @ (w if is_kept else self.__dict__.setdefault("_own", w)).T.to(x))

    outputs: dict[str, Callable[..., Tensor]] = {
        "parameters of zeros": lambda self, x, w, h: silu(h) * (w / w).mean(),
        "parameters of the other sign": lambda self, x, w, h: silu(x @ w.clamp(min=-4).T),
        "parameters that are others": own,
        "strided input": lambda self, x, w, h: silu(from_start(x) @ w.T),
        "output differs|another output": lambda self, x, w, h: silu(h) + 0 * torch.empty_like(h),
        "five dimensions": lambda self, x, w, h: silu(h) * (1 + (h.dim() > 4)),
        "batches of one row": lambda self, x, w, h: (
            silu(h) * (1 + (h.dim() == 3 and h.shape[1] == 1))
        ),
        "batches without rows": lambda self, x, w, h: (
            silu(h)[..., : h.shape[-1] // (len(h) or 1)]
            if h.dim() == 3 and not h.numel()
            else silu(h)
        ),
        "expanded rows": lambda self, x, w, h: silu(h) * (1 + (x.dim() > 1 and not x.stride(0))),
        "float64 as the default dtype": lambda self, x, w, h: (
            silu(h) * torch.ones(8).to(h) if torch.get_default_dtype() == torch.float32 else h
        ),
        "three threads": lambda self, x, w, h: silu(h) * (1 + (torch.get_num_threads() == 3)),
        "autocast, eval": lambda self, x, w, h: (
            silu(h) * (1 + (not self.basic_ops[0].training and torch.is_autocast_enabled("cpu")))
        ),
        "precision of float32": lambda self, x, w, h: eagerly(
            lambda: torch.set_float32_matmul_precision("high"), silu(h)
        ),
        "Python's random state": lambda self, x, w, h: eagerly(lambda: random.seed(3), silu(h)),
        "filters of warnings": lambda self, x, w, h: eagerly(
            lambda: warnings.simplefilter("ignore"), silu(h)
        ),
        "the version of input": lambda self, x, w, h: eagerly(
            lambda: x.detach().mul_(2).div_(2), silu(h)
        ),
        "training of a SiLU": lambda self, x, w, h: eagerly(
            lambda: self.basic_ops[1].eval(), silu(h)
        ),
    }
    for message, method in outputs.items():
        yield wrong(f"surroundings: {message}", Slots, message, output=method)

    def adds(self: Any, g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
        found, weight = right(self, g, x, w, b), self.basic_ops[0].weight
        return eagerly(lambda: setattr(weight, "grad", found[1].to(weight)), found[0]), *found[1:]

    yield wrong("surroundings: .grad", Joint, r"\.grad of parameter", gradients=adds)
    factors: dict[str, tuple[str, Callable[..., float]]] = {
        "another thread": ("in another thread", lambda self, x, w: hasattr(local, "is_set")),
        "a weight compared": (
            "hooks that copy",
            lambda self, x, w: 1 + (x.dtype == torch.float32 and w.data_ptr() != address(self)),
        ),
        "frozen in three dimensions": (
            "together: .*frozen",
            lambda self, x, w: 1 + (x.dim() == 3 and not self.basic_ops[0].weight.requires_grad),
        ),
        "frozen in float64": (
            "together: .*float64",
            lambda self, x, w: 1 + (x.dtype == torch.float64 and not requires_grad(self, 1)),
        ),
    }

    def address(self: Any) -> int:
        return 0 if torch.compiler.is_compiling() else self.basic_ops[0].weight.data_ptr()

    def requires_grad(self: Any, op: int) -> bool:
        return self.basic_ops[op].bias.requires_grad

    for name, (message, factor) in factors.items():

        def scaled(self: Any, g: Tensor, x: Tensor, w: Tensor, b: Tensor, f: Any = factor) -> Any:
            is_traced = torch.compiler.is_compiling()
            times = 1 if is_traced or torch.is_autocast_enabled("cpu") else f(self, x, w)
            return [times * grad for grad in right(self, g, x, w, b)]

        yield wrong(f"two at once: {name}", Joint, message, output=in_thread, gradients=scaled)


def rounded() -> Iterator[Row]:
    """What rounds where the ops do not, only in 16 bits."""
    near = "must be about as near to the result in float64"

    def is_low(x: Tensor) -> bool:
        return x.element_size() == 2

    def residual(self: Any, x: Tensor, extra: Tensor) -> Any:
        return (x * self.basic_ops[1].scale + extra.to(x)).to(extra), x.clone()

    yield wrong("rounded: the residual", Fork, near, outputs=residual)

    def gradients(self: Any, scale: float, grad: Tensor, grad_extra: Tensor) -> Any:
        is_rounded = torch.is_autocast_enabled("cpu")
        return grad * scale + grad_extra, grad.bfloat16().to(grad) if is_rounded else grad

    yield wrong("rounded: the residual's gradient", Fork, near, gradients=gradients)

    def saved(self: Any, x: Tensor) -> Any:
        own, *others = Joint.saved(self, x)
        return own.to(torch.float8_e4m3fn).to(own) if is_low(own) else own, *others

    yield wrong("rounded: saved in 8 bits", Joint, f"{near}|differs", saved=saved)
    generator = torch.Generator()

    def drawn(self: Any, x: Tensor) -> Tensor:
        output = Joint.output(self, x)
        if torch.compiler.is_compiling() or not is_low(output):
            return output
        noise = torch.rand(output.shape, generator=generator) - 0.5
        return (output.float() * (1 + 2**-7 * noise)).to(output)

    yield wrong("rounded: by chance", Joint, "two equal calls", output=drawn)

    def slot(self: Any, rstd: Tensor, x: Tensor) -> Tensor:
        return rstd.bfloat16().to(rstd) if x.dtype == torch.bfloat16 else rstd

    yield wrong("rounded: a slot", NormSlots, "bfloat16: slot 1 of op 0 .RMSNorm. must", slot=slot)

    def to_17_bits(self: Any, x: Tensor) -> Tensor:
        return Joint.output(self, x) * (1 + 2e-5 * (x.dtype == torch.float32))

    yield wrong("rounded: float32 to 17 bits", Joint, f"eager: output {near}", output=to_17_bits)


def left() -> Iterator[Row]:
    """What a call leaves on modules, tensors and the process, and buffers in turn."""
    ring: dict[Any, list[Tensor]] = {}

    def in_turn(self: Any, x: Tensor) -> Any:
        saved = Joint.saved(self, x)
        if torch.compiler.is_compiling():
            return saved
        key = (x.shape, x.dtype)
        buffers = ring[key] = ring.get(key, [torch.empty_like(x), torch.empty_like(x)])[::-1]
        return buffers[0].data.copy_(x), *saved[1:]

    yield wrong("left: two buffers in turn", Joint, "another call before backward", saved=in_turn)

    def weight(self: Any) -> Any:
        return self.basic_ops[0].owner.weight

    def hook(self: Any) -> None:
        if weight(self).requires_grad:
            weight(self).register_hook(lambda grad: grad)

    settings: dict[str, Callable[[Any], Any]] = {
        "attributes of a SiLU": lambda self: self.basic_ops[2].register_buffer("n", torch.ones(1)),
        "attributes of parameter": lambda self: setattr(weight(self), "last", torch.ones(1)),
        "hooks of parameter": hook,
        "hooks of a SiLU": lambda self: self.basic_ops[2].register_forward_hook(lambda *a: None),
        "memory of parameter": lambda self: setattr(weight(self), "data", weight(self).data + 0),
        "numpy's random state": lambda self: np.random.rand(),
        "collector of garbage": lambda self: gc.disable(),
        "environment variables": lambda self: os.environ.update(TOPS_TEST="1"),
        "flags of oneDNN": lambda self: torch.backends.mkldnn.set_flags(False),
        "flags of cuDNN": lambda self: setattr(torch.backends.cudnn, "benchmark", True),
    }
    for what, setting in settings.items():

        def sets(self: Any, x: Tensor, setting: Callable[[Any], Any] = setting) -> Tensor:
            return eagerly(lambda: setting(self), Joint.output(self, x))

        yield wrong(f"left: {what}", Joint, f"{what}.* must not change", output=sets)

    def of_16_bits(self: Any, x: Tensor) -> Tensor:
        return Joint.output(self, x) * (1 + (x.dim() > 1 and len(x) > 2**16))

    yield wrong("left: rows beyond 2^16", Joint, "tens of thousands of rows", output=of_16_bits)


def scales() -> Iterator[Row]:
    """Attributes of several ops, and those with values of their own."""
    right, sizes = Scales.output, "thousands of rows, without grad"
    outputs: dict[str, Callable[..., Tensor]] = {
        "scale of one op|attributes of other values": lambda self, x, a, b: right(self, x, b, a),
        "scale of 1": lambda self, x, a, b: right(self, x, a, b) if a != 1 else x,
    }
    for message, method in outputs.items():
        yield wrong(f"scales: {message}", Scales, message, output=method)
    divided = Scales.gradient
    yield wrong(
        "scales: one divides",
        Scales,
        "scale of 0",
        gradient=lambda self, g, x, a, b: divided(self, g, x * a / a, a, b),
    )
    yield wrong(
        "scales: clamped in backward",
        Scales,
        "float64, large inputs",
        gradient=lambda self, g, x, a, b: divided(self, g, x.clamp(-40, 40), a, b),
    )

    def without_grad(self: Any, input_: Tensor, *, requires_grad: list[bool], **unused: Any) -> Any:
        output, *others = Scales.fuser_forward_compute(self, input_)
        is_wrong = not any(requires_grad) and len(rows(input_)) > 1024
        return output + 1 if is_wrong else output, *others

    yield wrong("scales: many rows without grad", Scales, sizes, fuser_forward_compute=without_grad)


def typed() -> Iterator[Row]:
    """What tables, integers, floats in a tuple, masks and recipes have to show."""
    first: dict[Any, Any] = {}

    def cached(key: str, tensors: Any) -> Any:
        return tensors if torch.compiler.is_compiling() else first.setdefault(key, tensors)

    def cached_tables(self: Any, x: Tensor, *tables: Tensor) -> Any:
        key = f"{tables[0].shape} {tables[0].dtype}"
        return Rotated.output(self, x, *cached(key, [table.clone() for table in tables]))

    def data(self: Any, x: Tensor, *tables: Tensor) -> Any:
        return Rotated.output(self, x, *tables)[0], [table.data for table in tables]

    def back(self: Any, attributes: Any, grad: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return Rotated.gradients(self, attributes, grad, cos, -sin)

    yield wrong("typed: rotated forward", Rotated, "gradient of input 0", gradients=back)
    yield wrong("typed: cached tables", Rotated, "output differs", output=cached_tables)
    yield wrong("typed: tables' data", Rotated, "input 1 unsaved", output=data)

    def splits(self: Any, splits: Tensor) -> Tensor:
        return cached("splits", splits.clone())

    yield wrong("typed: cached splits", Grouped, "inputs of other values", splits=splits)

    def read(self: Any, attributes: Any) -> Any:
        return self.basic_ops[1].scaling

    yield wrong("typed: a fixed scaling", Adapted, "of other values", scaling=lambda *a: (0.5,))
    yield wrong("typed: scaling is read", Adapted, "attributes that backward read", scaling=read)

    def without_mask(self: Any, x: Tensor, *extra: Tensor) -> Any:
        op = self.basic_ops[1]
        w, a, b = op.weight0, op.lora_a0, op.lora_b0
        x, options = x.to(w.dtype), ([8], [0], op.scaling, 0.0, True, True)
        output, *kept = OPS.lora_linear(x, [w], [], [a], [b], *options)
        return output, (x, *kept, w, a, b)

    yield wrong("typed: dropout ignored", Adapted, "p of 1", output=without_mask)

    def all_zeros(self: Any, x: Tensor) -> Tensor:
        product = self.product(x)
        is_zero = torch.compiler.is_compiling() or self.basic_ops[0].training or product.any()
        return silu(product) + (not is_zero)

    yield wrong("typed: zeros in eval", Joint, "together: .*parameters of zeros", output=all_zeros)

    def sums(self: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None) -> Any:
        found, ((total,), _) = Grads.gradients(self, grad, x, weight)
        if x is not None and x.dtype == torch.bfloat16 and len(rows(x)) > 99:
            total = torch.zeros_like(total)
            for part, own in zip(rows(grad).split(16), rows(x).split(16), strict=True):
                total = total + part.T @ own
        return found, [(total,), ()]

    yield wrong("typed: sums in 16 bits", Grads, "positive inputs and", gradients=sums)
    function = replacing(Slots, tops.BasicLinear, tops.SiLU, follows=False)
    yield Row("typed: recipe ignored", "forward", function, None, mlp, "a recipe of 4 bits")


WRONG = [
    *typed(),
    *left(),
    *rounded(),
    *scales(),
    *surroundings(),
    *numbers(),
    *unsaved(),
    *slots(),
    *outputs(),
    *gradients(),
    *joints(),
    *forks(),
]
