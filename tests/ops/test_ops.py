"""Every op of `op_cases.py` against its plain meaning: values, gradients, and what is saved."""

import copy
import io
import math
import pickle

import pytest
import torch
from checks import check_op
from helpers import (
    as_tuple,
    assert_equal,
    differentiable,
    every_dtype,
    floating,
    saved_bytes,
    strided,
)
from op_cases import CASES, NAMES, run_seeded

import transformer_ops as tops

every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)


@every_dtype
@every_case
def test_values_and_gradients(case, dtype):
    check_op(case, case.build(dtype), case.inputs(dtype), dtype)


@every_dtype
@every_case
def test_many_rows(case, dtype):
    # More rows than one thread takes, and tails that no vector fills.
    op, inputs = case.build(dtype), case.inputs(dtype, (129, *case.row))
    check_op(case, op, inputs, dtype)


@every_case
def test_one_row(case):
    check_op(case, case.build(), case.inputs(shape=case.row), torch.float32)


@pytest.mark.parametrize("case", [c for c in CASES if c.elementwise], ids=lambda c: c.name)
def test_zero_dimensional(case):
    check_op(case, case.build(), case.inputs(shape=()), torch.float32)


@pytest.mark.parametrize("batch", [(0,), (2, 0, 3)])
@every_case
def test_empty_batch(case, batch):
    op, inputs = case.build(), case.inputs(shape=(*batch, *case.row))
    check_op(case, op, inputs, torch.float32)


@every_dtype
@every_case
def test_strides(case, dtype):
    """Inputs and gradients that are not contiguous, and gradients that are expanded."""
    op = case.build(dtype)
    check_op(case, op, [strided(tensor) for tensor in case.inputs(dtype)], dtype, expand_grads=True)
    like = case.inputs(dtype)[: 1 + case.extra_inputs]
    swapped = case.with_extras([tensor.detach().transpose(0, 1) for tensor in like])
    check_op(case, op, swapped, dtype)


@every_case
def test_gradcheck(case):
    op, inputs = case.build(torch.float64), case.inputs(torch.float64, (2, *case.row))
    parameters = list(op.parameters())

    def function(*tensors):
        return floating(as_tuple(run_seeded(op, *tensors[: len(inputs)])))

    assert torch.autograd.gradcheck(function, (*inputs, *parameters))
    if case.saves_input:
        # In random directions: a column for each number of each gradient takes minutes in all.
        assert torch.autograd.gradgradcheck(function, (*inputs, *parameters), fast_mode=True)
        return
    with pytest.raises(NotImplementedError, match=r"^\[\w+\] second derivatives must have .*, got"):
        torch.autograd.grad(function(*inputs), inputs[0], create_graph=True)


@every_dtype
@every_case
def test_saved_bytes(case, dtype):
    op, inputs = case.build(dtype), case.inputs(dtype)
    kept = saved_bytes(op, *inputs, call=lambda *inputs: run_seeded(op, *inputs))
    rows, h = math.prod(case.batch), math.prod(case.row)
    assert kept == math.ceil(rows * case.saved(h, dtype.itemsize))


@every_case
def test_frozen_parameters_and_inputs(case):
    """Each source of gradients alone gets the gradient that it gets among all."""
    op, inputs = case.build(), case.inputs()
    sources = [*differentiable(inputs), *op.parameters()]
    outputs = differentiable(as_tuple(run_seeded(op, *inputs)))
    grads = [torch.randn(output.shape) for output in outputs]
    everything = torch.autograd.grad(outputs, sources, grads)
    for source, want in zip(sources, everything, strict=True):
        for other in sources:
            other.requires_grad_(other is source)
        outputs = as_tuple(run_seeded(op, *inputs))
        assert len(outputs) >= len(grads)
        by_output = [
            (o, g) for o, g in zip(floating(outputs), grads, strict=True) if o.requires_grad
        ]
        found, given = zip(*by_output, strict=True)
        (got,) = torch.autograd.grad(found, [source], given)
        torch.testing.assert_close(got, want)
    for source in sources:
        source.requires_grad_(False)
    assert not any(output.requires_grad for output in as_tuple(op(*inputs)))


@every_case
def test_alone_equals_sequential(case):
    op, inputs = case.build(), case.inputs()
    alone = as_tuple(run_seeded(op, *inputs))
    together = as_tuple(run_seeded(tops.Sequential(op), *inputs))
    grouped = as_tuple(run_seeded(tops.OperationFuser([op]), *inputs))
    for a, b, c in zip(alone, together, grouped, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@every_case
def test_second_backward(case):
    op, inputs = case.build(), case.inputs()
    outputs = differentiable(as_tuple(run_seeded(op, *inputs)))
    sources = [*differentiable(inputs), *op.parameters()]
    grads = [torch.randn(output.shape) for output in outputs]
    first = torch.autograd.grad(outputs, sources, grads, retain_graph=True)
    second = torch.autograd.grad(outputs, sources, grads)
    assert_equal(first, second)
    # An output that is its input, as nn.Identity gives it, has no node to use up.
    if outputs[0] is not inputs[0] and outputs[0].grad_fn.name() != "ViewBackward0":
        saves = case.saved(16, 4) > 0
        if saves:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(outputs, sources, grads)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.saved(32, 4) - c.saved(16, 4) >= 64 and c.saves_input],
    ids=lambda case: case.name,
)
def test_modified_saved_tensor_is_detected(case):
    op, inputs = case.build(), case.inputs()
    x = inputs[0] * 1
    outputs = as_tuple(op(x, *inputs[1:]))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@every_case
def test_wrong_input(case):
    op = case.build()
    if not case.any_dtype:
        for dtype in (torch.int64, torch.complex64, torch.bool):
            inputs = case.inputs()
            main = inputs[: 1 + case.extra_inputs]
            bad = [*(torch.ones_like(t, dtype=dtype) for t in main), *inputs[len(main) :]]
            with pytest.raises(RuntimeError, match=r"\[\w+\] \w+ must be .*, got "):
                op(*bad)
    name = type(op).__name__
    if case.bad is not None:
        shape, message = case.bad
        with pytest.raises(RuntimeError, match=rf"^\[{name}\] {message}") as error:
            op(*case.inputs(shape=shape))
        assert "(op" not in str(error.value)
    for given in ("x", None, [1.0]):
        with pytest.raises(TypeError, match=rf"\[{name}\] inputs must be tensors, got"):
            op(given, *case.inputs()[1:])
    with pytest.raises(
        ValueError, match=rf"\[{name}\] extra inputs must be {len(case.inputs()) - 1}"
    ):
        op(*case.inputs(), torch.ones(3))
    check_op(case, op, case.inputs(), torch.float32)


@every_case
def test_copies_give_the_same(case):
    op, inputs = case.build(), case.inputs()
    want = as_tuple(run_seeded(op, *inputs))
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(op), pickle.loads(pickle.dumps(op))]
    twins += [torch.load(buffer, weights_only=False), copy.copy(op)]
    for twin in twins:
        assert [type(t) for t in twin.basic_ops] == [type(t) for t in op.basic_ops]
        assert_equal(want, as_tuple(run_seeded(twin, *inputs)))
    other = case.build()
    other.load_state_dict(op.state_dict())
    assert_equal(want, as_tuple(run_seeded(other, *inputs)))


@every_case
def test_modes_without_gradients(case):
    op, inputs = case.build(), case.inputs()
    want = as_tuple(run_seeded(op, *inputs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for a, b in zip(want, as_tuple(run_seeded(op, *inputs)), strict=True):
                assert torch.equal(a, b) and b.grad_fn is None


@every_case
def test_meta_device(case):
    op = case.build().to("meta")
    inputs = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in case.inputs()]
    outputs = as_tuple(op(*inputs))
    real = as_tuple(case.build()(*case.inputs()))
    for a, b in zip(outputs, real, strict=True):
        assert a.is_meta and a.shape == b.shape and a.dtype == b.dtype
    outputs, sources = differentiable(outputs), [*differentiable(inputs), *op.parameters()]
    grads = torch.autograd.grad(outputs, sources, [torch.ones_like(o) for o in outputs])
    for grad, source in zip(grads, sources, strict=True):
        assert grad.shape == source.shape and grad.dtype == source.dtype
