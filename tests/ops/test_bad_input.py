"""Bad input: a clear error of the expected type, before anything changed; the next call works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import assert_equal

import transformer_ops as tops


def block() -> tops.Sequential:
    return tops.Sequential(
        tops.RMSNorm(8),
        tops.Linear(8, 16),
        tops.SwiGLU(),
        tops.Dropout(0.5),
        tops.AddExtraInput(),
        tops.MakeExtraOutput(),
    )


def good() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, 8), torch.ones(3, 8)


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Parameters, gradients and random state stay as they are, and the next call is as before."""
    torch.manual_seed(7)
    want = module(*good())
    torch.manual_seed(7)
    random = torch.get_rng_state()
    state = {name: (t, t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    versions = {name: tensor._version for name, (tensor, _) in state.items()}
    yield
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is state[name][0] and torch.equal(tensor, state[name][1])
        assert tensor._version == versions[name] and tensor.grad is None
    assert_equal(module(*good()), want)


BAD_TENSORS = {
    "last dimension": (torch.ones(3, 7), r"\[RMSNorm\] input must end in dimensions \[8\]"),
    "0-dim": (torch.tensor(1.0), r"\[RMSNorm\] input must end in dimensions \[8\]"),
    "integer": (
        torch.ones(3, 8, dtype=torch.int64),
        r"\[RMSNorm\] input must be float16.*, got Long",
    ),
    "bool": (torch.ones(3, 8, dtype=torch.bool), r"\[RMSNorm\] input must be float16.*, got Bool"),
    "complex": (torch.ones(3, 8, dtype=torch.complex64), r"input must be float16.*, got Complex"),
    "meta": (torch.ones(3, 8, device="meta"), "tensors must be on one device, got meta and cpu"),
    "nested": (
        torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(1, 8)]),
        r"tensors must be dense, got a nested tensor; pad it, or use one tensor of all rows",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
@pytest.mark.parametrize("grad", [True, False])
def test_bad_main_input(kind, grad):
    tensor, message = BAD_TENSORS[kind]
    module = block()
    with torch.set_grad_enabled(grad), unchanged(module):
        with pytest.raises(RuntimeError, match=message):
            module(tensor, good()[1])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.ones(3, 7),
            r"\[AddExtraInput\] extra_input must have shape \[3, 8\], got \[3, 7\] \(op 4 of",
        ),
        (torch.ones(8), r"\[AddExtraInput\] extra_input must have shape"),
        (torch.ones(3, 8, dtype=torch.int32), r"\[AddExtraInput\] extra_input must be float16"),
        (torch.ones(3, 8, device="meta"), r"\[run_plan\] tensors must be on one device"),
    ],
    ids=["last dimension", "broadcast", "integer", "meta"],
)
def test_bad_extra_input(tensor, message):
    module = block()
    with unchanged(module), pytest.raises(RuntimeError, match=message):
        module(good()[0], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128]
)
def test_a_linear_casts_no_integers(dtype):
    for module in (tops.Linear(8, 4), tops.Sequential(tops.Linear(8, 4), tops.GELU())):
        with pytest.raises(RuntimeError, match=r"^\[Linear\] input must be float16"):
            module(torch.ones(3, 8, dtype=dtype))
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match="input must be"),
        ):
            module(torch.ones(3, 8, dtype=dtype))
        module(torch.ones(3, 8))


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_a_parameter_of_a_dtype_without_kernels(dtype):
    name = str(dtype).removeprefix("torch.")
    message = rf"\[Linear\] weight must be float16.* or float64, got {name}"
    for module, place in (
        (tops.Linear(8, 4), "$"),
        (tops.Sequential(tops.GELU(), tops.Linear(8, 4)), r" \(op 1 of the Sequential\)$"),
    ):
        module.requires_grad_(False).to(dtype)
        with pytest.raises(RuntimeError, match=message + place):
            module(torch.ones(3, 8))
        module.to(torch.float32)(torch.ones(3, 8))


def test_odd_width_of_a_glu():
    with pytest.raises(RuntimeError, match=r"^\[SwiGLU\] input must .*, got "):
        tops.SwiGLU()(torch.ones(3, 7))
    with pytest.raises(RuntimeError, match=r"^\[SwiGLU\] input must .*, got "):
        tops.SwiGLU(glu_interleave_size=4)(torch.ones(3, 12))


@pytest.mark.cuda(backend=False)
def test_tensors_on_different_devices():
    module = block()
    message = "tensors must be on one device, got cuda:0 and cpu"
    with unchanged(module), pytest.raises(RuntimeError, match=message):
        module(good()[0].cuda(), good()[1])
    # Without a backend that is said first.
    with pytest.raises(RuntimeError, match=rf"\[linear_epilogue\] ({message}|.* in this build)"):
        typed = torch.ops.transformer_ops.linear_epilogue
        typed(good()[0].cuda(), torch.ones(4, 8), torch.ones(4), None, 1.0)


# ---- calls


@pytest.mark.parametrize("count", [0, 2, 3])
def test_missing_and_surplus_extra_inputs(count):
    module = block()
    with unchanged(module):
        message = (
            rf"\[Sequential\] extra inputs must be 1 for extra_input of op 4 \(AddExtraInput\), "
            rf"got {count}$"
        )
        with pytest.raises(ValueError, match=message):
            module(good()[0], *[good()[1]] * count)
    message = r"\[AddExtraInput\] extra inputs must be 1 for extra_input, got 0$"
    with pytest.raises(ValueError, match=message):
        tops.AddExtraInput()(good()[0])
    fuser = tops.OperationFuser([tops.GELU()])
    with pytest.raises(ValueError, match=r"\[OperationFuser\] extra inputs must be 0, got 1"):
        fuser(*good())
    with pytest.raises(ValueError, match="must be 0, got 1"):
        tops.Sequential()(*good())
    compiled = torch.compile(module, backend="eager")
    message = r"must be 1 for extra_input of op 4 \(AddExtraInput\), got 0"
    with pytest.raises(ValueError, match=message):
        compiled(good()[0])


def test_inputs_that_are_no_tensors():
    module = block()
    with unchanged(module):
        for bad in (None, 1.0, [1.0], "x"):
            with pytest.raises(TypeError, match="must be tensors, got"):
                module(bad, good()[1])
            with pytest.raises(TypeError, match="must be tensors, got"):
                module(good()[0], bad)


class Scale(tops.BasicOperation):
    """Takes a keyword argument."""

    def op_forward(self, ctx, input_, *, factor=2.0):
        ctx.factor = factor
        return input_ * factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.factor, ()


def test_unknown_op_kwargs():
    scale, other = Scale(), Scale()
    module = tops.Sequential(tops.GELU(), scale, torch.nn.Tanh())
    x = torch.ones(3)
    for key in (other, 3, -1, 2, "1", module[2], None, True):
        with pytest.raises(ValueError, match=r"\[Sequential\] op_kwargs keys must be"):
            module(x, op_kwargs={key: {"factor": 3.0}})
    with pytest.raises(TypeError, match=r"\[GELU\] a native op takes no keyword arguments"):
        module(x, op_kwargs={0: {"factor": 3.0}})
    with pytest.raises(TypeError, match="unknown"):
        module(x, op_kwargs={1: {"unknown": 3.0}})
    want = torch.tanh(3 * tops.GELU()(x))
    torch.testing.assert_close(module(x, op_kwargs={1: {"factor": 3.0}}), want)
    torch.testing.assert_close(module(x, op_kwargs={scale: {"factor": 3.0}}), want)


# ---- channels


def make_channel(*, first="c", second="c"):
    return (
        tops.MakeExtraOutput().set_extra_output_channel(0, first),
        tops.AddExtraInput().set_extra_input_channel(0, second),
    )


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (lambda: make_channel(second="other"), "other"),
        (lambda: make_channel()[::-1], "'c'"),
        (lambda: (make_channel()[0], *make_channel()), "'c'"),
    ],
    ids=["no producer", "producer after its consumer", "two producers"],
)
def test_channels_that_do_not_fit(ops, message):
    module = tops.Sequential(*ops())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            module(torch.ones(3))


def test_channels_are_fixed_once_captured():
    make, add = make_channel()
    module = tops.Sequential(make, add)
    want = module(torch.ones(3))
    with pytest.raises(RuntimeError, match="before a group captures the op"):
        make.set_extra_output_channel(0, "other")
    with pytest.raises(RuntimeError, match="before a group captures the op"):
        add.set_extra_input_channel(0, None)
    assert_equal(module(torch.ones(3)), want)


# ---- plans


def plan_text() -> str:
    module = block()
    module(good()[0].requires_grad_(), good()[1])
    return str(module.plans()[0])


def test_plan_texts_that_do_not_parse():
    text = plan_text()
    assert str(tops.Plan.parse(text)) == text
    lines = text.splitlines()
    bad = [
        "",
        "plan",
        "plan 5",
        "nonsense",
        text + "nonsense\n",
        text.replace("ops=[0]", "ops=[9]"),
    ]
    bad += [text.replace("op 0 RMSNorm", "op 0 NoSuchOp"), text.replace("x1, s0.rstd", "x1, x2")]
    bad += [text.replace("x0,", "x77,"), text.replace("save s0.input=x0, ", "save ")]
    bad += [
        text[: len(text) // 2],
        "\n".join(lines[:-1]),
        "\n".join(lines[1:]),
        text.replace("]", ""),
    ]
    bad += [text.replace("eps=1e-05", "eps=small"), "\0" * 10]
    for broken in bad:
        assert broken != text
        with pytest.raises(RuntimeError, match=r"\[plan\]|plan"):
            tops.Plan.parse(broken)
    dropout = tops.Sequential(tops.Dropout(0.5))
    dropout(torch.randn(2, 4))
    wrong = str(dropout.plans()[0]).replace("p=0.5", "p=-1")
    with pytest.raises(RuntimeError, match="must have attribute 'p' of type float, got -1"):
        tops.Plan.parse(wrong)
    for broken in (None, 1, ["plan 5"]):
        with pytest.raises(TypeError):
            tops.Plan.parse(broken)


def test_run_plan_checks_its_arguments():
    text = plan_text()
    x, extra = good()
    parameters = list(block().parameters())
    run = torch.ops.transformer_ops.run_plan
    assert len(run(text, x, [extra], parameters)) == 2
    with pytest.raises(RuntimeError, match=r"\[run_plan\] tensors must be"):
        run(text, x, [], parameters)
    with pytest.raises(RuntimeError, match=r"\[run_plan\] tensors must be"):
        run(text, x, [extra], parameters[1:])
    for broken in ("nonsense", text.replace("rms_norm(", "no_such_op(")):
        with pytest.raises(RuntimeError, match=r"plan|no_such_op"):
            run(broken, x, [extra], parameters)


def test_plans_before_any_call():
    # Equal modules share their plans: nobody else has these.
    alone = tops.ConstantScale(0.98765)
    for module in (tops.Sequential(alone), tops.OperationFuser([tops.ConstantScale(0.98764)])):
        name = type(module).__name__
        asked = "plans" if isinstance(module, tops.Sequential) else "plan"
        for method in (asked, "explain"):
            message = rf"\[{name}\] {method}\(\) must follow a call, got none so far"
            with pytest.raises(RuntimeError, match=message):
                getattr(module, method)()
    module = tops.Sequential(tops.ConstantScale(0.98763))
    with pytest.raises(TypeError):
        module(None)  # lays the groups out, which have no plans then
    for method in ("plans", "explain"):
        with pytest.raises(RuntimeError, match=rf"\[Sequential\] {method}\(\) must follow"):
            getattr(module, method)()


# ---- state


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_another_shape(assign):
    module = block()
    state = {name: torch.full_like(t, 3.0) for name, t in module.state_dict().items()}
    state["1.bias"] = torch.ones(15)
    with unchanged(module):
        with pytest.raises(RuntimeError, match=r"size mismatch for 1.bias|1\.bias.*shape"):
            module.load_state_dict(state, assign=assign)


# ---- containers


def test_modules_of_a_sequential():
    module = tops.Sequential(tops.GELU(), tops.ReLU())
    for bad in (1, None, torch.ones(1), tops.GELU):
        with pytest.raises(TypeError, match=r"\[Sequential\] modules must be nn.Modules"):
            tops.Sequential(bad)
        with pytest.raises(TypeError, match=r"\[Sequential\] modules must be nn.Modules"):
            module.append(bad)
        with pytest.raises(TypeError, match=r"\[Sequential\] modules must be nn.Modules"):
            module.extend([tops.GELU(), bad])
    assert len(module) == 2
    for index in (2, -3):
        with pytest.raises(IndexError):
            module[index]
        with pytest.raises(IndexError):
            module[index] = tops.GELU()
        with pytest.raises(IndexError):
            module.pop(index)
    with pytest.raises(TypeError, match=r"\[OperationFuser\] ops must be FusibleOperations"):
        tops.OperationFuser([torch.nn.GELU()])
    with pytest.raises(ValueError, match=r"\[OperationFuser\] ops must not be empty"):
        tops.OperationFuser([])


def test_main_grad_is_chosen_before_the_first_call() -> None:
    linear = tops.Linear(8, 8)
    module = tops.Sequential(linear, tops.GELU())
    x = torch.randn(2, 8)
    before = module(x)
    with pytest.raises(RuntimeError, match="accumulate_into_main_grad must be set before"):
        linear.accumulate_into_main_grad = True
    assert torch.equal(module(x), before)
