"""Weights that are held as codes: what they compute, what they cost, how they travel."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn as nn
from helpers import residual, saved_tensors
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

FORMATS = ["e4m3", "e5m2", "e4m3 1x128", "e4m3 128x128", "mx e4m3", "nvfp4", "nvfp4 16x16"]
FORMATS += ["int8 1x32", "e4m3 pow2"]
NVFP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
QuantizedTensor = tops.QuantizedTensor


def hold(module: nn.Module, format: str) -> None:
    """Makes the weights of all products quantized ones."""
    for op in module.modules():
        if isinstance(op, tops.Linear | tops.BasicLinear):
            op.weight = nn.Parameter(QuantizedTensor.quantize(op.weight, format))


def with_decoded_weights(module: nn.Module) -> nn.Module:
    """The same model over plain weights with the numbers that the codes stand for."""
    plain = copy.deepcopy(module)
    for op in plain.modules():
        if isinstance(op, tops.Linear | tops.BasicLinear):
            op.weight = nn.Parameter(op.weight.detach().dequantize())
    return plain


BLOCKS = {
    "linear": lambda f: [tops.Linear(64, 48, **f)],
    "no bias": lambda f: [tops.BasicLinear(64, 64, **f)],
    "gelu": lambda f: [tops.Linear(64, 96, **f), tops.GELU(), tops.Linear(96, 64, **f)],
    "llama": lambda f: residual(
        tops.RMSNorm(64, **f),
        tops.Linear(64, 128, bias=False, **f),
        tops.SwiGLU(),
        tops.Linear(64, 64, bias=False, **f),
    ),
}


def gradients(module, x, run=None):
    module.zero_grad()
    x = x.detach().requires_grad_()
    output = (run or module)(x)
    output.float().square().sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **found}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert type(tensor) is torch.Tensor, name
        assert torch.equal(tensor, wanted[name]), name


def block(name, dtype=torch.float32):
    torch.manual_seed(0)
    return tops.Sequential(*BLOCKS[name]({"dtype": dtype}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_that_of_the_decoded_weight(format, dtype):
    model = block("gelu", dtype)
    hold(model, format)
    x = torch.randn(5, 64, dtype=dtype)
    assert_same(gradients(model, x), gradients(with_decoded_weights(model), x))
    assert "dequantize" in model.plans()[0].text


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling(), Float8CurrentScaling()])
def test_blocks_with_and_without_a_recipe(name, recipe):
    model = block(name, torch.bfloat16)
    hold(model, "mx e4m3")
    plain = with_decoded_weights(model)
    x = torch.randn(5, 64, dtype=torch.bfloat16)

    def no_weights(role):
        return None if role.tensor_type == "weight" else formats[role.tensor_type]

    if recipe is None:
        assert_same(gradients(model, x), gradients(plain, x))
        return
    # What is held quantized is taken as it is.
    formats = dict(zip(("input", "weight", "grad_output"), recipe.operands, strict=True))
    with tops.autocast(recipe=recipe):
        found = gradients(model, x)
    with tops.autocast(recipe=CustomRecipe(no_weights)):
        wanted = gradients(plain, x)
    assert_same(found, wanted)


def test_autocast_of_torch():
    model = block("gelu")
    hold(model, "mx e4m3")
    x = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(model, x)
        wanted = gradients(with_decoded_weights(model), x)
    # Codes of this format are exact in bfloat16, so decoding into it is the same.
    assert_same(found, wanted)


def test_exported():
    model = block("llama").eval()
    hold(model, "mx e4m3")
    x = torch.randn(5, 64)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model = block("llama")
    hold(model, "mx e4m3")
    x = torch.randn(5, 64)

    def run(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    assert_same(gradients(model, x, run), gradients(model, x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break(backend):
    model = block("llama", torch.bfloat16)
    hold(model, "mx e4m3")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_same(gradients(model, x, compiled), gradients(model, x))
    model.to(torch.float32)
    assert_same(gradients(model, x.float(), compiled), gradients(model, x.float()))


def test_backward_keeps_codes_only():
    model = block("no bias", torch.bfloat16)
    hold(model, "mx e4m3")
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as kept:
        model(x)
    weight = model[0].weight
    shapes = sorted(str((tuple(t.shape), t.dtype)) for t in kept)
    wanted = [x, weight.codes, weight.scale]
    assert shapes == sorted(str((tuple(t.shape), t.dtype)) for t in wanted)
    told = str(model.explain())
    assert "weights held quantized: 0.weight mx e4m3; decoded for each product" in told
    assert "128 bytes a row saved for backward" in told


def test_a_user_s_python_step_reads_numbers():
    class Doubled(tops.BasicOperation):
        def __init__(self):
            super().__init__()
            weight = QuantizedTensor.quantize(torch.randn(64), "int8 1x32")
            self.weight = nn.Parameter(weight)

        def op_forward(self, ctx, input_, **kwargs):
            ctx.save_for_backward(input_)
            return input_ * self.weight

        def op_backward(self, ctx, grad_output):
            (input_,) = ctx.saved_tensors
            return grad_output * self.weight, [(grad_output * input_).sum(0)]

    model = tops.Sequential(tops.Linear(64, 64), Doubled())
    hold(model, "mx e4m3")
    x = torch.randn(5, 64)
    found = gradients(model, x)
    weight = model[1].weight.detach().dequantize()
    wanted = (x @ model[0].weight.detach().dequantize().T + model[0].bias) * weight
    torch.testing.assert_close(found["output"], wanted.detach())


def test_gradients_accumulate_into_main_grad():
    model = tops.Sequential(tops.Linear(64, 48, accumulate_into_main_grad=True))
    hold(model, "mx e4m3")
    plain = with_decoded_weights(model)
    x = torch.randn(5, 64)
    for one in (model, plain):
        one[0].weight.main_grad = torch.ones(48, 64)
        one(x).sum().backward()
        assert one[0].weight.grad is None
    assert torch.equal(model[0].weight.main_grad, plain[0].weight.main_grad)


# ---- the tensor


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(format, dtype):
    x = torch.randn(32, 64).to(dtype)
    q = QuantizedTensor.quantize(x, format)
    codes, scale = torch.ops.transformer_ops.quantize(x, format)
    name = str(dtype).split(".")[1]
    wanted = torch.ops.transformer_ops.dequantize(codes, scale, format, name)
    assert (q.shape, q.dtype, q.device, q.format) == (x.shape, dtype, x.device, format)
    assert torch.equal(q.dequantize(), wanted)
    assert type(q + 1) is torch.Tensor and torch.equal(q + 1, wanted + 1)
    assert torch.equal(q.to(torch.float64), wanted.to(torch.float64))
    assert torch.equal(q.t(), wanted.t()) and torch.equal(q[3:5], wanted[3:5])
    assert f"format='{format}'" in repr(q)
    for same in (q.detach(), q.clone(), q.to("cpu"), copy.deepcopy(q)):
        assert type(same) is QuantizedTensor and torch.equal(
            same.codes.view(torch.uint8), bytes_of(q)
        )


def bytes_of(q):
    return q.codes.view(torch.uint8)


def test_writing_encodes_again():
    q = QuantizedTensor.quantize(torch.randn(32, 64), "mx e4m3")
    expected = QuantizedTensor.quantize(q.dequantize() * 3, "mx e4m3")
    assert q.mul_(3) is q
    assert torch.equal(bytes_of(q), bytes_of(expected))
    other = torch.randn(32, 64)
    q.copy_(other)
    assert torch.equal(bytes_of(q), bytes_of(QuantizedTensor.quantize(other, "mx e4m3")))
    q.copy_(QuantizedTensor.quantize(other, "int8 1x32"))
    plain = torch.empty(32, 64)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())
    torch._foreach_add_([q, plain], 1.0)
    torch.mul(other, 2, out=q)
    assert torch.equal(bytes_of(q), bytes_of(QuantizedTensor.quantize(other * 2, "mx e4m3")))
    q[4:8].zero_()
    assert q[4:8].abs().sum() == 0 and q[:4].abs().sum() > 0 and q[8:].abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"must broadcast to shape \(32, 64\), got \(3, 64\)"):
        q.copy_(torch.randn(3, 64))


@pytest.mark.parametrize("foreach", [False, None])
def test_an_optimizer_steps_in_place(foreach):
    model = block("gelu")
    hold(model, "mx e4m3")
    weight, codes = model[0].weight, model[0].weight.codes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model[0].weight is weight and weight.codes is codes
    state = optimizer.state[weight]["exp_avg"]
    assert type(state) is torch.Tensor and state.dtype == torch.float32


def test_differentiable():
    q = QuantizedTensor.quantize(torch.randn(4, 32), "mx e4m3").requires_grad_()
    q.dequantize().square().sum().backward()
    assert torch.equal(q.grad, 2 * q.detach().dequantize())


def test_as_input_of_a_group():
    model = tops.Sequential(tops.GELU(), tops.Linear(64, 48))
    q = QuantizedTensor.quantize(torch.randn(4, 64), "mx e4m3").requires_grad_()
    x = q.detach().dequantize().requires_grad_()
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        q.grad = x.grad = None
        run(q).sum().backward()
        model(x).sum().backward()
        assert torch.equal(q.grad, x.grad)


# ---- modules


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        (None, "mx e4m3"),
        (Float8CurrentScaling(), "e4m3"),
        (DelayedScaling(), "e4m3"),
        (Float8BlockScaling(), "e4m3 128x128"),
        (NVFP4, "nvfp4 16x16"),
        (CustomRecipe(lambda role: "int8 1x32"), "int8 1x32"),
        (CustomRecipe(lambda role: None), None),
    ],
)
def test_model_init(recipe, format):
    with tops.quantized_model_init(recipe=recipe):
        model = tops.Sequential(tops.RMSNorm(64), tops.Linear(64, 48), tops.BasicLinear(48, 64))
        with tops.quantized_model_init(enabled=False):
            inner = tops.Linear(8, 8)
    assert type(inner.weight) is nn.Parameter
    assert type(tops.Linear(8, 8).weight) is nn.Parameter
    assert type(model[0].weight) is nn.Parameter and type(model[1].bias) is nn.Parameter
    for op in (model[1], model[2]):
        assert isinstance(op.weight, nn.Parameter) and op.weight.requires_grad
        assert getattr(op.weight, "format", None) == format
    assert model(torch.randn(3, 64)).shape == (3, 64)


def test_the_recipe_around_is_the_one_for_weights():
    with tops.autocast(recipe=Float8CurrentScaling()), tops.quantized_model_init():
        assert tops.Linear(32, 32).weight.format == "e4m3"


def test_initial_values_are_kept_on_request():
    plain = tops.Linear(32, 32)
    torch.manual_seed(0)
    with tops.quantized_model_init(preserve_high_precision_init_val=True):
        held = tops.Linear(32, 32)
    assert torch.equal(held.weight.get_high_precision_init_val(), plain.weight)
    held.weight.clear_high_precision_init_val()
    assert held.weight.get_high_precision_init_val() is None
    with tops.quantized_model_init():
        assert tops.Linear(32, 32).weight.get_high_precision_init_val() is None


def test_a_region_on_the_meta_device():
    with tops.quantized_model_init():
        model = tops.Linear(64, 48, device="meta")
    model.to_empty(device="cpu")
    assert isinstance(model.weight, QuantizedTensor) and model.weight.device.type == "cpu"
    model.reset_parameters()
    assert 0 < model.weight.abs().max() <= 0.125 + 1e-6


def test_dtypes_of_a_module():
    with tops.quantized_model_init():
        model = tops.Linear(64, 48)
    before = bytes_of(model.weight).clone()
    model.to(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16 == model.bias.dtype
    assert torch.equal(bytes_of(model.weight), before)
    assert model(torch.randn(2, 64)).dtype == torch.bfloat16


def test_state_dicts_travel():
    with tops.quantized_model_init():
        model, other = tops.Linear(64, 48), tops.Linear(64, 48)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["weight"], QuantizedTensor)
    other.load_state_dict(loaded)
    assert torch.equal(bytes_of(other.weight), bytes_of(model.weight))
    plain = nn.Linear(64, 48)
    plain.load_state_dict(loaded)
    assert torch.equal(plain.weight, model.weight.dequantize())
    other.load_state_dict(nn.Linear(64, 48).state_dict(), strict=True)
    assert isinstance(other.weight, QuantizedTensor)
    x = torch.randn(3, 64)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x)) and twin.weight.requires_grad
        assert isinstance(twin.weight, nn.Parameter) and twin.weight is not model.weight


def test_a_model_takes_a_byte_a_weight():
    with tops.quantized_model_init():
        model = tops.BasicLinear(256, 128, dtype=torch.bfloat16)
    parts = (model.weight.codes, model.weight.scale)
    assert sum(part.untyped_storage().nbytes() for part in parts) == 256 * 128 * 33 // 32


# ---- errors


def test_what_cannot_be():
    with pytest.raises(RuntimeError, match="format must be"):
        QuantizedTensor.quantize(torch.randn(4, 4), "e9m9")
    with pytest.raises(ValueError, match="even for format 'nvfp4', got 5"):
        QuantizedTensor.quantize(torch.randn(4, 5), "nvfp4")
    with pytest.raises(ValueError, match="dtype must be floating"):
        QuantizedTensor(torch.empty(1), torch.empty(1), "e4m3", torch.int64)
    with pytest.raises(TypeError, match="recipe must be one of"):
        tops.quantized_model_init(recipe="mxfp8")
    with pytest.raises(TypeError, match="enabled must be a bool"):
        tops.quantized_model_init(enabled=1)
    norm = tops.RMSNorm(64)
    norm.weight = nn.Parameter(QuantizedTensor.quantize(norm.weight, "mx e4m3"))
    with pytest.raises(RuntimeError, match=r"\[RMSNorm\] weight must be a plain tensor"):
        norm(torch.randn(2, 64))


def test_second_derivatives_and_transforms_raise():
    model = tops.Sequential(tops.Linear(64, 48), tops.GELU())
    hold(model, "mx e4m3")
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="must run over plain parameters"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="must run over plain parameters"):
        torch.func.jvp(model, (x.detach(),), (x.detach(),))


def test_parts_that_do_not_fit():
    good = QuantizedTensor.quantize(torch.randn(4, 64), "mx e4m3")
    bad = QuantizedTensor(good.codes, good.scale[:, :1], "mx e4m3", torch.float32)
    with pytest.raises(RuntimeError, match="scale must have shape"):
        bad.dequantize()
    op = tops.BasicLinear(64, 4)
    op.weight = nn.Parameter(QuantizedTensor(good.codes, good.scale, "e4m4", torch.float32))
    with pytest.raises(RuntimeError, match="format must be"):
        op(torch.randn(2, 64))


@pytest.mark.parametrize("format", ["mx e4m3", "int8 1x32", "e4m3 pow2"])
@pytest.mark.parametrize("single", [True, False])
def test_experts_with_quantized_weights(format, single):
    with tops.quantized_model_init(recipe=CustomRecipe(lambda role: format)):
        model = tops.Sequential(tops.GroupedLinear(3, 64, 32, single_grouped_weight=single))
    plain = copy.deepcopy(model)
    for name in ["weight"] if single else ["weight0", "weight1", "weight2"]:
        held = getattr(model[0], name)
        assert held.format == format
        setattr(plain[0], name, nn.Parameter(held.detach().dequantize()))
    splits = torch.tensor([4, 0, 5])
    x = torch.randn(10, 64)
    found = gradients(model, x, lambda x: model(x, splits))
    assert_same(found, gradients(plain, x, lambda x: plain(x, splits)))


def test_views_that_stay_quantized():
    q = QuantizedTensor.quantize(torch.randn(8, 64), "mx e4m3")
    numbers = q.dequantize()
    views = [q.view(8, 64), q.view(-1), *q.split(3), *q.chunk(2), q[2:5], q.narrow(0, 1, 4)]
    plain = [numbers, numbers.view(-1), *numbers.split(3), *numbers.chunk(2)]
    for view, wanted in zip(views, [*plain, numbers[2:5], numbers.narrow(0, 1, 4)], strict=True):
        assert isinstance(view, QuantizedTensor) and view.shape == wanted.shape
        assert torch.equal(view.dequantize(), wanted)
    views[-1].fill_(2.0)
    assert torch.equal(q[1:5].dequantize(), torch.full((4, 64), 2.0))
    zeros = q.new_zeros(3, 64)
    assert isinstance(zeros, QuantizedTensor) and not zeros.dequantize().any()
    # Blocks that are not parts of one row; a row that blocks do not fill.
    for other in (
        q[:, 3:7],
        q.t(),
        QuantizedTensor.quantize(torch.randn(4, 40), "mx e4m3").view(-1),
    ):
        assert type(other) is torch.Tensor
    square = QuantizedTensor.quantize(torch.randn(256, 64), "e4m3 128x128")
    assert type(square[:128]) is torch.Tensor and type(square.split(128)[0]) is torch.Tensor


def test_threads_may_share_a_region():
    region = tops.quantized_model_init()
    entered, left = threading.Event(), threading.Event()
    found = []

    def other():
        with tops.quantized_model_init(enabled=False), region:
            entered.set()
            left.wait()
            found.append(tops.Linear(32, 32).weight)
        found.append(tops.Linear(32, 32).weight)

    thread = threading.Thread(target=other)
    with region:
        thread.start()
        entered.wait()
    assert type(tops.Linear(32, 32).weight) is nn.Parameter
    left.set()
    thread.join()
    assert isinstance(found[0], QuantizedTensor) and type(found[1]) is nn.Parameter
