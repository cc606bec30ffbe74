"""Quantized tensors in and out of inference mode, as plain tensors are; copies and their shapes."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_ops as tops
from transformer_ops import QuantizedTensor

# Blocks of rows, one scale for the tensor, and two codes in a byte.
every_format = pytest.mark.parametrize("format", ["mx e4m3", "e4m3", "nvfp4"])
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "no mode": nullcontext,
}

VIEWS: dict[str, Callable[[Any], Any]] = {
    "alias": torch.ops.aten.alias,
    "as_strided": lambda t: t.as_strided(t.shape, t.stride()),
    "chunk": lambda t: t.chunk(2),
    "columns": lambda t: t[:, 4:8],
    "contiguous": lambda t: t.contiguous(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "diagonal": lambda t: t.diagonal(),
    "expand": lambda t: t.expand(2, *t.shape),
    "expand_as": lambda t: t.expand_as(t),
    "flatten": lambda t: t.flatten(),
    "hsplit": lambda t: t.hsplit(2),
    "lift_fresh": torch.ops.aten.lift_fresh,
    "movedim": lambda t: t.movedim(0, 1),
    "narrow": lambda t: t.narrow(0, 2, 4),
    "permute": lambda t: t.permute(1, 0),
    "ravel": lambda t: t.ravel(),
    "real": lambda t: t.real,
    "reshape": lambda t: t.reshape(-1),
    "row": lambda t: t[1],
    "rows": lambda t: t[2:4],
    "select": lambda t: t.select(1, 0),
    "split": lambda t: t.split(16),
    "split_with_sizes": lambda t: t.split([8, 24]),
    "squeeze": lambda t: t.squeeze(),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "tensor_split": lambda t: t.tensor_split(2),
    "to its device": lambda t: t.to("cpu"),
    "transpose": lambda t: t.transpose(0, 1),
    "unbind": lambda t: t.unbind(),
    "unflatten": lambda t: t.unflatten(0, (2, -1)),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "view": lambda t: t.view(16, 128),
    "view, flat": lambda t: t.view(-1),
    "view_as": lambda t: t.view_as(t),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "add_": lambda t: t.add_(0),
    "clone": lambda t: t.clone(),
    "copy_": lambda t: t.copy_(torch.ones(t.shape)),
    "deepcopy": copy.deepcopy,
    "detach_": lambda t: t.detach_(),
    "matmul": lambda t: torch.ones(2, t.shape[0]) @ t,
    "multiply": lambda t: t * 2,
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "parameter": nn.Parameter,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "requires_grad_": lambda t: t.requires_grad_(),
    "rows, written": lambda t: t[2:4].zero_(),
    "sum": lambda t: t.sum(),
    "to bfloat16": lambda t: t.to(torch.bfloat16),
    "zero_": lambda t: t.zero_(),
    "zeros_like": torch.zeros_like,
}


def decoded(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.dequantize() if isinstance(found, QuantizedTensor) else found


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.is_inference(), tensor.requires_grad


def outcome(function: Callable[[Any], Any], tensor: Tensor) -> list[tuple[Any, Tensor]] | str:
    """What a function gives, or the error that it raises."""
    try:
        found = function(tensor)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    tensors = found if isinstance(found, tuple | list) else [found]
    return [(facts(tensor), decoded(tensor).clone()) for tensor in tensors]


@every_format
@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("read", MODES)
@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_as_a_plain_tensor(name: str, made: str, read: str, format: str) -> None:
    with MODES[made]():
        quantized = QuantizedTensor.quantize(torch.randn(32, 64), format)
        plain = quantized.dequantize()
    with MODES[read]():
        function = {**VIEWS, **OTHERS}[name]
        got, want = outcome(function, quantized), outcome(function, plain)
    if isinstance(got, str) or isinstance(want, str):
        assert got == want
        return
    assert [row for row, _ in got] == [row for row, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("made", ["inference mode", "no mode"])
def test_views_of_fake_tensors(name: str, made: str) -> None:
    with FakeTensorMode() as mode:
        with MODES[made]():
            quantized = QuantizedTensor.quantize(torch.randn(32, 64), "mx e4m3")
            plain = torch.randn(32, 64)
        assert mode is not None
        for read in ("inference mode", "no mode"):
            with MODES[read]():
                rows = [VIEWS[name](tensor) for tensor in (quantized, plain)]
            got, want = (r if isinstance(r, tuple | list) else [r] for r in rows)
            assert list(map(facts, got)) == list(map(facts, want))


def test_rows_stay_quantized_in_inference_mode() -> None:
    quantized = QuantizedTensor.quantize(torch.randn(32, 64), "mx e4m3")
    with torch.inference_mode():
        for found in (quantized.detach(), quantized[2:4], *quantized.chunk(2), quantized.view(-1)):
            assert type(found) is QuantizedTensor
        part = quantized[2:4]
        assert part.codes.data_ptr() == quantized.codes[2:4].data_ptr()


# ---- modules


def make_linear(format: str | None) -> tops.Linear:
    torch.manual_seed(0)
    module = tops.Linear(64, 32)
    if format is not None:
        module.weight = nn.Parameter(QuantizedTensor.quantize(module.weight, format))
    return module


def saved_and_loaded(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    found: dict[str, Tensor] = torch.load(file)
    return found


def loaded(module: nn.Module, **options: bool) -> Any:
    with torch.inference_mode(False):
        state = copy.deepcopy(module).state_dict()
    module.load_state_dict(state, **options)
    return module.parameters()


X = torch.randn(8, 64)
# Within inference mode, on a module that was made before.
WORK: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: [m(X)],
    "F.linear": lambda m: [nn.functional.linear(X, m.weight, m.bias)],
    "state_dict": lambda m: m.state_dict().values(),
    "load_state_dict": loaded,
    "load_state_dict, assign": lambda m: loaded(m, assign=True),
    "functional_call": lambda m: [torch.func.functional_call(m, m.state_dict(), X)],
    "deepcopy": lambda m: copy.deepcopy(m).parameters(),
    "copy of a parameter": lambda m: [copy.copy(m.weight)],
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).parameters(),
    "torch.save and load": lambda m: saved_and_loaded(m).values(),
    "to its own device": lambda m: m.to("cpu").parameters(),
    "requires_grad_": lambda m: m.requires_grad_(False).requires_grad_().parameters(),
    "data": lambda m: [m.weight.data],
    "parameters_to_vector": lambda m: [nn.utils.parameters_to_vector(m.parameters())],
}


@every_format
@pytest.mark.parametrize("name", WORK)
def test_a_module_in_inference_mode(name: str, format: str) -> None:
    rows = []
    for module in (make_linear(None), make_linear(format)):
        with torch.inference_mode():
            rows.append([facts(tensor) for tensor in WORK[name](module)])
        # And still trains.
        module(X).sum().backward()
        assert module.weight.grad is not None
    assert rows[0] == rows[1]


@every_format
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_module_in_inference_mode(backend: str, format: str) -> None:
    module = make_linear(format)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(X), module(X))
        assert compiled(X).is_inference()
    compiled(X).sum().backward()
    got, module.weight.grad = module.weight.grad, None
    module(X).sum().backward()
    torch.testing.assert_close(got, module.weight.grad)


@every_format
def test_a_distributed_checkpoint_in_inference_mode(format: str, tmp_path: Path) -> None:
    module, other = make_linear(format), make_linear(format)
    with torch.no_grad():
        other.weight.zero_()
    with torch.inference_mode():
        dcp.save(module.state_dict(), checkpoint_id=tmp_path)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state)
    assert facts(other.weight) == facts(module.weight)
    assert torch.equal(decoded(other.weight), decoded(module.weight))


@pytest.mark.parametrize(
    "make", [lambda: tops.Linear(64, 32), lambda: tops.GroupedLinear(1, 64, 32)]
)
def test_weights_made_in_inference_mode_can_train(make: Callable[[], nn.Module]) -> None:
    recipe = tops.recipe.MXFP8BlockScaling()
    with torch.inference_mode(), tops.quantized_model_init(recipe=recipe):
        module = make()
    x = torch.randn(8, 64, requires_grad=True)
    given = (torch.tensor([8]),) if isinstance(module, tops.GroupedLinear) else ()
    with torch.inference_mode():
        module(x, *given)
    module(x, *given).sum().backward()
    for parameter in module.parameters():
        assert not parameter.is_inference()
        assert parameter.grad is not None


@every_format
def test_an_inference_tensor_gets_no_gradient(format: str) -> None:
    """One error of torch's, where a plain weight has it."""
    said = []
    for quantize in (False, True):
        module = make_linear(None)
        with torch.inference_mode():
            weight = module.weight.clone()
            weight = QuantizedTensor.quantize(weight, format) if quantize else weight
        with pytest.raises(RuntimeError, match="requires_grad=True on inference tensor") as error:
            nn.Parameter(weight)
        module.weight = nn.Parameter(weight, requires_grad=False)
        module(X).sum().backward()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for") as saved:
            module(X.clone().requires_grad_())
        said.append((str(error.value), str(saved.value).partition("\n")[0]))
    assert said[0] == said[1]
    parts = weight.codes, weight.scale
    with pytest.raises(RuntimeError, match="requires_grad=True on inference tensor"):
        QuantizedTensor(*parts, format, torch.float32, requires_grad=True)


# ---- copies


def bytes_of(tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
    return tensor.codes.view(torch.uint8).clone(), tensor.scale.clone()


SHAPES = [(32, 64), (64,), (1, 64), (32, 2), (2,), (1, 32, 64), (64, 32), (31, 64), (0, 64)]


@every_format
@pytest.mark.parametrize("source", ["plain", "of its format", "of another format"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_broadcasts_or_changes_nothing(
    shape: tuple[int, ...], source: str, format: str
) -> None:
    target = QuantizedTensor.quantize(torch.randn(32, 64), format)
    given = torch.randn(shape)
    if source != "plain":
        other = format if source == "of its format" else "int8 1x32"
        given = QuantizedTensor.quantize(given, other)
    before = bytes_of(target)
    plain = torch.empty(32, 64)
    try:
        plain.copy_(decoded(given))
    except RuntimeError:
        text = f"source of copy_ must broadcast to shape (32, 64), got {shape}"
        with pytest.raises(RuntimeError, match=re.escape(f"[QuantizedTensor] {text}")):
            target.copy_(given)
        assert all(map(torch.equal, bytes_of(target), before))
        return
    target.copy_(given)
    # Between tensors of one format and shape, codes are copied.
    is_exact = source == "of its format" and shape == (32, 64)
    want: Any = given if is_exact else QuantizedTensor.quantize(plain, format)
    assert all(map(torch.equal, bytes_of(target), bytes_of(want)))


RESHAPED: dict[str, Callable[[Any], Any]] = {
    "resize_": lambda t: t.resize_(2, 2),
    "squeeze_": lambda t: t.squeeze_(),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_another_shape_in_place_changes_nothing(name: str) -> None:
    quantized = QuantizedTensor.quantize(torch.randn(1, 64), "mx e4m3")
    before = bytes_of(quantized)
    with pytest.raises(RuntimeError, match=rf"aten::{name} must keep the shape \(1, 64\), got"):
        RESHAPED[name](quantized)
    assert quantized.shape == (1, 64)
    assert all(map(torch.equal, bytes_of(quantized), before))


BAD = {
    "no such format": (torch.ones(4, 64), "format must be one of 'e4m3', .*, got 'no such format'"),
    "exact": (torch.ones(4, 64), "format must be one of 'e4m3', .*, got 'exact'"),
    "nvfp4": (
        torch.ones(3, 5),
        "last dimension must be even for format 'nvfp4', got 5",
    ),
    "nvfp4 16x16": (torch.tensor(1.0), "must be even for format 'nvfp4 16x16', got none"),
    "mx e4m3": (torch.ones(4, dtype=torch.int32), "input must be float16, .*, got Int"),
}


@pytest.mark.parametrize("format", BAD)
def test_what_cannot_be_quantized(format: str) -> None:
    tensor, text = BAD[format]
    with pytest.raises((RuntimeError, ValueError), match=text):
        QuantizedTensor.quantize(tensor, format)
