"""Logits that are computed when they are read are the tensor that they replace."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_head_and_loss import V, batch, pair
from torch import Tensor, nn


def lose_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0)


def write_one(model: Any) -> None:
    model.lm_head.weight.data[3, 5] = 2


def swap_rows(model: Any) -> None:
    weight = model.lm_head.weight
    weight.data.copy_(weight.flip(0))


def free(model: Any) -> None:
    model.lm_head.weight.untyped_storage().resize_(0)


def assign(model: Any) -> None:
    state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def move_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


def new_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(V, 32))


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, V, bias=False)


READS: dict[str, Callable[[Any], Tensor]] = {
    "logits": lambda out: out.logits + 0,
    "a loss": lambda out: F.cross_entropy(out.logits.view(-1, V), batch()["input_ids"].view(-1)),
}
every_read = pytest.mark.parametrize("read", READS.values(), ids=READS)


@every_read
@pytest.mark.parametrize("change", [assign, move_data, new_parameter, new_head])
def test_logits_are_those_of_forward(change: Any, read: Any) -> None:
    plain, fused = pair()
    want, got = plain(**batch()), fused(**batch())
    change(plain)
    change(fused)
    torch.testing.assert_close(read(got), read(want))


@every_read
@pytest.mark.parametrize("change", [lose_data, write_one, swap_rows, free])
def test_numbers_that_are_lost_raise(change: Any, read: Any) -> None:
    _, fused = pair()
    out = fused(**batch())
    change(fused)
    with pytest.raises(RuntimeError, match=r"\[fuse\] logits must be read before the weight"):
        read(out)


@pytest.mark.parametrize("is_meta", [False, True])
def test_functional_call(is_meta: bool) -> None:
    plain, fused = pair()
    doubled = {name: 2 * p.detach() for name, p in fused.named_parameters()}
    found = []
    for model in (plain, fused):
        model = copy.deepcopy(model).to("meta") if is_meta else model
        for name, buffer in plain.named_buffers():
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
        given = {name: p.clone().requires_grad_() for name, p in doubled.items()}
        out = torch.func.functional_call(model, given, kwargs=batch())
        sources = list(given.values())
        total = out.loss + out.logits.square().mean()
        found.append((out.loss, out.logits * 1, *torch.autograd.grad(total, sources)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


GIVEN = batch()


def _loss_of(model: Any, parameters: dict[str, Tensor]) -> Tensor:
    loss: Tensor = torch.func.functional_call(model, parameters, kwargs=GIVEN).loss
    return loss


def _of_head(model: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weight = model.lm_head.weight.detach()
    return lambda w: _loss_of(model, {"lm_head.weight": w}), weight


def _jvp(model: Any) -> Any:
    loss, weight = _of_head(model)
    return torch.func.jvp(loss, (weight,), (torch.ones_like(weight),))


def _vmap(model: Any) -> Any:
    loss, weight = _of_head(model)
    return torch.func.vmap(loss)(torch.stack([weight, 2 * weight]))


def _of_given_logits(model: Any) -> Any:
    z = model(**batch()).logits
    found = torch.func.grad(lambda w: (z * w).square().sum())(torch.ones(V))
    return found, z.sum(), torch.func.vmap(torch.sum)(model(**batch()).logits)


def _dual(model: Any) -> Any:
    loss, weight = _of_head(model)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        return torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent


def _hessian(model: Any) -> Any:
    def penalty(parameters: list[Tensor]) -> list[Tensor]:
        out = model(**batch())
        total = out.loss + out.logits.square().mean()
        found = torch.autograd.grad(total, parameters, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in found), parameters))

    return penalty(list(model.parameters()))


def _second_of_loss(model: Any) -> Any:
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(**batch()).loss, parameters, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in found), parameters)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: torch.func.grad(_of_head(model)[0])(_of_head(model)[1]),
    "jvp": _jvp,
    "vmap": _vmap,
    "a dual level": _dual,
    "of given logits": _of_given_logits,
    "second derivatives": _second_of_loss,
    "second derivatives of both": _hessian,
}


@pytest.mark.parametrize("call", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_transforms(family: str, call: Callable[[Any], Any]) -> None:
    plain, fused = pair(family)
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    torch.testing.assert_close(call(fused), call(plain), rtol=1e-4, atol=1e-5)


# Each gives the numbers that somebody sees, whose sum has gradients.
ALIASES: dict[str, Callable[[Any], Any]] = {}


def alias(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    ALIASES[use.__name__] = use
    return use


@alias
def a_view_follows_what_is_written(out: Any) -> Any:
    z = out.logits
    flat = z.view(-1, V)
    z.mul_(0.5)
    return F.cross_entropy(flat, batch()["input_ids"].view(-1)), z.sum(), flat.square().sum()


@alias
def what_is_written_to_a_view(out: Any) -> Any:
    z = out.logits
    z.view(-1, V).mul_(0.5)
    return z.square().sum()


@alias
def copies_do_not_follow(out: Any) -> Any:
    z = out.logits
    copies = z.double(), z / 2, z.view(-1, V).to(torch.float64), torch.tanh(z)
    z.zero_()
    return [copy.square().sum() for copy in copies]


@alias
def data(out: Any) -> Any:
    out.logits.data.mul_(0.5)
    return out.logits.square().sum()


@alias
def detached(out: Any) -> Any:
    out.logits.detach().mul_(0.5)
    return out.logits.square().sum()


@alias
def numpy(out: Any) -> Any:
    out.logits.detach().numpy()[...] = 1
    return out.logits.square().sum()


@alias
def out_argument(out: Any) -> Any:
    with torch.no_grad():
        z = torch.mul(torch.ones(2, 9, V), 2, out=out.logits.detach())
    return z.sum(), out.logits.sum()


@alias
def the_same_object(out: Any) -> Any:
    z = out.logits
    assert z.mul_(2) is z and z.contiguous() is z and z.requires_grad_() is z and not z.is_leaf
    return z.square().sum()


@alias
def set_items(out: Any) -> Any:
    out.logits[..., :3] = -1
    return out.logits.logsumexp(-1).mean(), out.loss


@alias
def foreach(out: Any) -> Any:
    z = out.logits
    with torch.no_grad():
        torch._foreach_mul_([z.detach()], 2)
    return z.square().sum()


@alias
def a_hook(out: Any) -> Any:
    seen: list[Tensor] = []
    out.logits.register_hook(lambda grad: seen.append(grad * 1) or grad * 2)
    total = out.loss + out.logits.square().mean()
    total.backward(retain_graph=True)
    return seen[0], total


@alias
def retained_gradients(out: Any) -> Any:
    out.logits.retain_grad()
    assert out.logits.retains_grad and out.logits.grad is None
    out.loss.backward(retain_graph=True)
    return out.logits.grad * 1, out.loss


@alias
def gradients_of_logits(out: Any) -> Any:
    (first,) = torch.autograd.grad(out.loss, out.logits, retain_graph=True)
    z = out.logits.mul_(2)
    (second,) = torch.autograd.grad(z.square().sum(), out.logits, retain_graph=True)
    return first * 1, second * 1, z.sum()


@alias
def gradients_after_a_write_without_them(out: Any) -> Any:
    out.logits.detach().mul_(0)
    (grad,) = torch.autograd.grad(out.loss, out.logits, retain_graph=True)
    return grad * 1, out.loss, out.logits.sum()


@alias
def a_hook_of_rows(out: Any) -> Any:
    flat = out.logits.view(-1, V)
    flat.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(flat, batch()["labels"].view(-1)), flat.square().mean()


@alias
def batched_gradients(out: Any) -> Any:
    grad = torch.tensor([1.0, -2.0])
    return *torch.autograd.grad(out.loss, out.logits, grad, True, is_grads_batched=True), out.loss


@alias
def given_gradients(out: Any) -> Any:
    (grad,) = torch.autograd.grad(out.loss, out.logits, retain_graph=True)
    out.logits.backward(grad, retain_graph=True)
    return out.loss


@alias
def another_loss_and_a_written_one(out: Any) -> Any:
    z = out.logits
    losses = [out.loss, F.cross_entropy(z.view(-1, V), batch()["input_ids"].view(-1))]
    rows = F.cross_entropy(z.view(-1, V), batch()["labels"].view(-1), reduction="none")
    z.zero_()
    return *losses, rows.square().sum(), z.sum()


@alias
def read_in_inference_mode(out: Any) -> Any:
    with torch.inference_mode():
        seen = out.logits.sum()
    return seen.clone(), out.logits.square().sum()


@alias
def pickled(out: Any) -> Any:
    z = out.logits.detach()
    return pickle.loads(pickle.dumps(z)), copy.deepcopy(z), copy.copy(out.logits), out.loss


@pytest.mark.parametrize("use", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_logits_are_the_tensor_that_they_replace(family: str, use: Callable[[Any], Any]) -> None:
    found = []
    for model in pair(family):
        seen = use(model(**batch()))
        seen = [seen] if isinstance(seen, Tensor) else list(seen)
        total = sum(t.sum() for t in seen if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        found.append([*(t.detach() for t in seen), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_logits_are_freed_without_the_garbage_collector() -> None:
    _, fused = pair("gemma2")
    gc.disable()
    out = fused(**batch())
    z = out.logits
    total = out.loss + z.sum() + z.view(-1, V).float().tanh().sum()
    total.backward()
    freed = [weakref.ref(vars(z)["_promise"]), weakref.ref(vars(z)["_promise"].product)]
    del out, z, total
    assert [ref() for ref in freed] == [None, None]
