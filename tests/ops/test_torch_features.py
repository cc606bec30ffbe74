"""What PyTorch offers around a module: autocast, checkpointing, hooks, state."""

import copy
import io

import pytest
import torch
from helpers import leaf, residual, saved_tensors
from op_cases import run_seeded
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops


def block(dropout=0.0, **kwargs):
    up, down = tops.Linear(16, 32, **kwargs), tops.Linear(32, 16, **kwargs)
    ops = [tops.LayerNorm(16, **kwargs), up, tops.GELU(), down, tops.Dropout(dropout)]
    return tops.Sequential(*residual(*ops))


class Plain(nn.Module):
    """The block in torch.nn, with its parameters."""

    def __init__(self, block):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        for mine, op in ((self.norm, block[1]), (self.up, block[2]), (self.down, block[4])):
            mine.load_state_dict(op.state_dict())

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return x + self.down(hidden)


def all_grads(module, x, call=None):
    x = leaf(x)
    output = (call or module)(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *module.parameters()])]


def assert_all_close(got, want, **tolerances):
    torch.testing.assert_close(got, want, **tolerances)


# ---- autocast


def test_autocast_is_near_the_reference():
    module = block()
    exact, x = Plain(module).double(), torch.randn(3, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = all_grads(module, x)
    want = all_grads(exact, x.double())
    assert got[0].dtype == torch.float32  # the residual is added to float32
    assert [grad.dtype for grad in got[1:]] == [torch.float32] * (1 + 6)
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_dtypes(dtype):
    linear, x = tops.Linear(8, 4), torch.randn(3, 8)
    norm = tops.LayerNorm(8)
    with torch.autocast("cpu", dtype):
        assert linear(x).dtype == dtype
        assert norm(x).dtype == dtype
        assert tops.Bias(8)(x).dtype == torch.float32
        assert tops.Sequential(linear, tops.GELU())(x).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert linear(x).dtype == torch.float32
    assert linear(x).dtype == torch.float32


def test_autocast_of_another_device_changes_nothing():
    linear, x = tops.Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert linear(x).dtype == torch.float32


def test_autocast_leaves_float64_alone():
    module, x = block().double(), torch.randn(3, 16, dtype=torch.float64)
    want = all_grads(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_close(all_grads(module, x), want)


def test_backward_outside_autocast_is_the_same():
    module, x = block(), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = all_grads(module, x)
        y = leaf(x)
        output = module(y)
    outside = torch.autograd.grad(output.square().sum(), [y, *module.parameters()])
    assert_all_close(outside, inside[1:])


def test_mixed_dtypes_of_input_and_weight():
    """Outside autocast a Linear returns the weight's dtype, its input gradient the input's."""
    linear = tops.Linear(8, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 8, requires_grad=True)
    y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and linear.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y, nn.functional.linear(x.bfloat16(), linear.weight, linear.bias))


# ---- saving


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_dropout(use_reentrant):
    module, x = block(dropout=0.5), torch.randn(3, 5, 16)
    want = run_seeded(lambda: all_grads(module, x))

    def checkpointed(x):
        return checkpoint(module, x, use_reentrant=use_reentrant)

    # Reentrant checkpointing knows backward() only.
    y = leaf(x)
    module.zero_grad()
    output = run_seeded(checkpointed, y)
    output.square().sum().backward()
    assert_all_close([output, y.grad, *(p.grad for p in module.parameters())], want)


def test_checkpoint_keeps_only_the_input():
    module, x = block(), torch.randn(3, 16, requires_grad=True)
    with saved_tensors() as kept:
        checkpoint(module, x * 1, use_reentrant=True)
    assert sum(t.numel() for t in kept) <= 2 * x.numel()


def test_saved_tensors_hooks_see_and_replace_what_is_saved():
    module, x = block(), torch.randn(3, 16)
    want = all_grads(module, x)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        assert_all_close(all_grads(module, x), want)
    assert len(packed) == len({(t.data_ptr(), t.shape, t.stride()) for t in packed})

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 0, lambda t: t):
        zeros = all_grads(module, x)
    assert not zeros[3].any()


def test_save_on_cpu_and_disabled_hooks():
    module, x = block(), torch.randn(3, 16)
    want = all_grads(module, x)
    with torch.autograd.graph.save_on_cpu():
        assert_all_close(all_grads(module, x), want)


# ---- modes


def test_inference_mode():
    with torch.inference_mode():
        module = block()
        x = torch.randn(3, 16)
        y = module(x)
    assert y.is_inference() and not any(p.is_inference() for p in module.parameters())
    torch.testing.assert_close(module(x.clone()), y)
    module(torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    frozen = block().requires_grad_(False)
    torch.testing.assert_close(frozen(x), frozen(x.clone()))


def test_no_grad_and_set_grad_enabled():
    module, x = block(), torch.randn(3, 16)
    with torch.no_grad():
        y = module(x)
        assert not y.requires_grad
        with torch.enable_grad():
            assert module(x).requires_grad
    torch.testing.assert_close(module(x), y)


def test_anomaly_mode_and_nan():
    module, x = block(), torch.randn(3, 16, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        module(x).sum().backward()
    x = torch.full((2, 16), float("nan"))
    assert module(x).isnan().all()


# ---- parameters are looked up at every call


def test_load_state_dict_assign():
    module, other, x = block(), block(), torch.randn(3, 16)
    module(x)
    module.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(module(x), other(x))
    module(x).sum().backward()
    assert module[2].weight.grad is not None


def test_meta_and_to_empty():
    module, want, x = block(device="meta"), block(), torch.randn(3, 16)
    assert module(x.to("meta")).shape == x.shape
    with pytest.raises(RuntimeError, match="must be on one device"):
        module(x)
    module.to_empty(device="cpu")
    module.load_state_dict(want.state_dict())
    torch.testing.assert_close(module(x), want(x))
    skeleton = block(device="meta")
    skeleton.load_state_dict(want.state_dict(), assign=True)
    torch.testing.assert_close(skeleton(x), want(x))


def test_moving_between_dtypes():
    module, x = block(), torch.randn(3, 16)
    module(x)
    exact = copy.deepcopy(module).double()
    torch.testing.assert_close(exact(x.double()).float(), module(x))
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_tied_weights():
    first, second = tops.Linear(8, 8, bias=False), tops.Linear(8, 8, bias=False)
    second.weight = first.weight
    module, x = tops.Sequential(first, tops.GELU(), second), torch.randn(3, 8)
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU(approximate="tanh"))
    plain[0].weight = nn.Parameter(first.weight.detach().clone())
    output = nn.functional.linear(plain(x), plain[0].weight)
    module(x).sum().backward()
    output.sum().backward()
    assert len(list(module.parameters())) == 1
    torch.testing.assert_close(first.weight.grad, plain[0].weight.grad)


def test_one_op_twice():
    op = tops.Linear(8, 8)
    module, x = tops.Sequential(op, tops.ReLU(), op), torch.randn(3, 8)
    want = all_grads(op, x, lambda x: op(torch.relu(op(x))))
    assert_all_close(all_grads(module, x), want)


def test_parametrization():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    module, x = tops.Sequential(tops.Linear(8, 8), tops.ReLU()), torch.randn(3, 8)
    module(x)
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    weight = module[0].weight
    assert torch.equal(weight, weight.T)
    torch.testing.assert_close(module(x), torch.relu(x @ weight.T))
    module(x).sum().backward()
    original = module[0].parametrizations.weight.original
    assert not original.grad.tril(-1).any() and original.grad.triu().any()
    normed = tops.Linear(8, 4)
    nn.utils.parametrizations.weight_norm(normed)
    torch.testing.assert_close(normed(x), nn.functional.linear(x, normed.weight, normed.bias))
    parametrize.remove_parametrizations(module[0], "weight")
    torch.testing.assert_close(module(x), torch.relu(x @ weight.T))


def test_optimizer_steps_are_seen():
    torch.manual_seed(3)
    module = block()
    plain, x = Plain(module), torch.randn(8, 16)
    for model in (module, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)


def test_state_of_a_sequential_travels():
    module, x = block(), torch.randn(3, 16)
    want = module(x)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = block()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), want)
    assert torch.equal(copy.deepcopy(module)(x), want)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), want)


# ---- hooks


def test_hooks_of_a_member_op_fire_in_a_group_of_its_own():
    module, x = block(), torch.randn(3, 16)
    want = all_grads(module, x)
    (before,) = module.plans()
    seen = []
    handles = [
        module[3].register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].shape))),
        module[3].register_forward_hook(lambda m, args, out: seen.append(("post", out.shape))),
        module[3].register_full_backward_hook(lambda m, gi, go: seen.append(("back", go[0].shape))),
    ]
    assert_all_close(all_grads(module, x), want)
    assert seen == [("pre", (3, 32)), ("post", (3, 32)), ("back", (3, 32))]
    assert [len(plan.ops) for plan in module.plans()] == [4, 1, 4]
    for handle in handles:
        handle.remove()
    assert_all_close(all_grads(module, x), want)
    assert len(seen) == 3 and module.plans() == [before]


def test_a_hook_may_change_the_output():
    module, x = (
        tops.Sequential(tops.Linear(8, 8), tops.GELU(), tops.Linear(8, 8)),
        torch.randn(3, 8),
    )
    module[1].register_forward_hook(lambda m, args, out: out * 2)
    want = module[2](2 * tops.GELU()(module[0](x)))
    torch.testing.assert_close(module(x), want)


def test_hooks_of_the_sequential_and_of_tensors():
    module, x = block(), torch.randn(3, 16, requires_grad=True)
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append("forward"))
    module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    module[2].weight.register_hook(lambda grad: seen.append("grad"))
    module[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    module(x).sum().backward()
    assert sorted(seen) == ["accumulated", "backward", "forward", "grad"]
    assert len(module.plans()) == 1


@pytest.mark.parametrize("position", range(7))
def test_a_hook_anywhere_cuts_no_channel(position):
    module, x = block(), torch.randn(3, 16)
    want = all_grads(module, x)
    module[position].register_forward_hook(lambda m, args, out: None)
    assert_all_close(all_grads(module, x), want)


def test_training_flag_does_not_replan_again_and_again():
    module, x = block(dropout=0.5), torch.randn(3, 16)
    for _ in range(3):
        module.train()(x)
        module.eval()(x)
    (group,) = module._groups()
    assert group._group.cached_plans == 2
