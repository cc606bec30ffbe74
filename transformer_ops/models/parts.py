"""What steps of a `forward` compute, as ops: submodules by their structure, and functions.

In: a module and steps, `self.down(F.silu(self.gate(x)) * self.up(x))`. Out: ops that borrow the
parameters, here PackedLinear, SwiGLU and Linear. FuseSkip says which step no op computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..modules.views import (
    Adapted,
    BorrowedDropout,
    BorrowedDropPath,
    BorrowedLayerScale,
    BorrowedLinear,
    BorrowedLoRALinear,
    BorrowedPackedLinear,
    check_linear,
    is_torch,
    register_view,
    view,
    weight_of,
)
from ..op.base import FusibleOperation
from ..op.borrowed import class_of, find_obstacle
from ..ops.activation import GELU, QGELU, ReLU, SiLU, SReLU
from ..ops.basic_linear import BasicLinear
from ..ops.constant_scale import ConstantScale
from ..ops.glu import GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU
from ..ops.lora_linear import LoRALinear
from ..ops.packed_linear import PackedLinear
from ..quantization.stored import is_stored
from .adapters import adapters_of, base_of, is_adapted
from .norms import norm
from .pattern import Names, Pattern, Steps, register_global, register_step
from .rules import FuseSkip, FuseUnfit
from .whole import check_number, find, name_of, names_in, patterns, unknown

__all__ = [
    "count_products",
    "dtypes_of",
    "linear",
    "ops_of",
    "ops_of_method",
    "part",
    "products",
]

MakeOp = Callable[[], FusibleOperation]


def ops_of(module: nn.Module, steps: Steps) -> list[FusibleOperation]:
    """The ops of steps in the `forward` of a module. FuseSkip for steps that no ops compute."""
    return [op for template, names in steps.list for op in template.make(module, names)]


def count_products(ops: Sequence[nn.Module]) -> int:
    """How many of the ops are products with weights; one with several weights counts as several."""
    basics = [basic for op in ops if isinstance(op, FusibleOperation) for basic in op.basic_ops]
    packed = [len(op.out_features) for op in basics if isinstance(op, PackedLinear | LoRALinear)]
    return sum(packed) + sum(isinstance(op, BasicLinear) for op in basics)


# ---- activations

# The forward of a class -> the op.
_ACTIVATIONS: tuple[tuple[tuple[Pattern, ...], MakeOp], ...] = (
    (patterns("return F.silu(H)", "return F.silu(H, inplace=self.inplace)"), SiLU),
    (patterns("return F.relu(H, inplace=self.inplace)"), ReLU),
    (patterns("return H * torch.sigmoid(1.702 * H)"), QGELU),
    (patterns("return torch.square(F.relu(H))"), SReLU),
    (
        patterns(
            "return 0.5 * H * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * "
            "(H + 0.044715 * torch.pow(H, 3.0))))",
            "return F.gelu(H, approximate='tanh')",
        ),
        GELU,
    ),
    (patterns("return F.gelu(H)"), functools.partial(GELU, "none")),
)
_CALLS_ACT = patterns("return self.act(H)")
# The op of an activation -> its gated unit.
_GATED_UNITS: dict[type, Callable[[Any], FusibleOperation]] = {
    SiLU: lambda _: SwiGLU(),
    ReLU: lambda _: ReGLU(),
    QGELU: lambda _: QGEGLU(),
    SReLU: lambda _: SReGLU(),
    GELU: lambda op: GEGLU(op.approximate),
}


def _activation(module: Any) -> FusibleOperation | None:
    for forms, make in _ACTIVATIONS:
        if find(module, forms) is not None:
            return None if getattr(module, "inplace", False) else make()
    if find(module, _CALLS_ACT) is None:
        return None
    act = module.act
    if act is nn.functional.gelu:
        return GELU("none")
    is_partial = isinstance(act, functools.partial) and act.func is nn.functional.gelu
    if not is_partial or act.args or act.keywords.keys() - {"approximate"}:
        return None
    return GELU(act.keywords.get("approximate", "none"))


def _gated_unit(ops: Sequence[FusibleOperation]) -> FusibleOperation:
    for kind, make in _GATED_UNITS.items():
        if len(ops) == 1 and isinstance(ops[0], kind):
            return make(ops[0])
    raise FuseSkip(f"there is no gated unit of {', '.join(type(op).__name__ for op in ops)}")


# ---- other modules

_LAYER_SCALES = patterns(
    "return H * self.any_gamma",
    "return H.mul_(self.any_gamma) if self.any_inplace else H * self.any_gamma",
)
# In one method (transformers), or in a function (timm).
_DROP_PATH = Pattern(
    """
    if self.any_p == 0.0 or not self.training:
        return H
    K = 1 - self.any_p
    S = (H.shape[0],) + (1,) * (H.ndim - 1)
    R = torch.rand(S, dtype=H.dtype, device=H.device)
    R = torch.floor(R + K)
    return H.div(K) * R
    """
)
_CALLS_DROP_PATH = Pattern("return drop_path(H, self.any_p, self.training, self.any_scales)")
_DROP_PATH_FUNCTION = Pattern(
    """
    if P == 0.0 or not T:
        return H
    K = 1 - P
    S = (H.shape[0],) + (1,) * (H.ndim - 1)
    R = H.new_empty(S).bernoulli_(K)
    if K > 0.0 and C:
        R.div_(K)
    return H * R
    """
)
# The Conv1D of GPT-2.
_TRANSPOSED_LINEARS = patterns(
    """
    S = H.size()[:-1] + (self.any_size,)
    H = torch.addmm(self.bias, H.view(-1, H.size(-1)), self.weight)
    return H.view(S)
    """
)
# The product of Falcon, which adds its bias in a statement of its own.
_LINEAR = Pattern(
    """
    Y = H @ self.weight.T
    if self.bias is None:
        return Y
    return Y + self.bias
    """
)
# The product of bitsandbytes in 4 bits.
_LINEAR_IN_4_BITS = Pattern(
    """
    fix_4bit_weight_quant_state_from_module(self)
    Q = self.weight.quant_state
    if H.device.type == "cpu" and self.support_avx512bf16_for_cpu and not self.training and \
            H.requires_grad == False and not getattr(Q, "packing_format_for_cpu", False):
        self.weight.data, Q = _convert_weight_packed_for_cpu(self.weight.data, Q)
    if not self.compute_type_is_set:
        self.set_compute_type(H)
        self.compute_type_is_set = True
    D = H.dtype
    if self.compute_dtype is not None:
        H = H.to(self.compute_dtype)
    B = self.bias
    if B is not None:
        if B.dtype != H.dtype:
            B.data = B.data.to(H.dtype)
        B = B.to(self.compute_dtype)
    return bnb.matmul_4bit(H, self.weight, bias=B, quant_state=Q).to(D)
    """
)
# The product of LLM.int8() (Dettmers et al. 2022), which rounds each row of its input, too.
_LINEAR_IN_8_BITS = Pattern(
    """
    self.state.is_training = self.training
    if self.weight.CB is not None:
        self.init_8bit_state()
    if self.bias is not None and self.bias.dtype != H.dtype:
        self.bias.data = self.bias.data.to(H.dtype)
    Y = bnb.matmul(H, self.weight, bias=self.bias, state=self.state)
    if not self.state.has_fp16_weights and self.state.CB is not None:
        self.weight.data = self.state.CB
    return Y
    """
)
_STEPS = Pattern("return any_steps(H)")


def _is_in_4_bits(module: nn.Module) -> bool:
    """Whether it is a Linear4bit of bitsandbytes, whose dtype is known. FuseSkip if it is not."""
    if names_in(class_of(module).forward, _LINEAR_IN_4_BITS) is None:
        return False
    found: Any = module
    if not is_stored(found.weight):
        raise FuseSkip("its weight is not quantized yet")
    if not found.compute_type_is_set or found.compute_dtype is None:
        raise FuseSkip("its dtype is that of its first call")
    return True


def _linear_in_4_bits(module: nn.Module) -> FusibleOperation | None:
    return BorrowedLinear(module) if _is_in_4_bits(module) else None


def _linear_in_two(module: nn.Module) -> FusibleOperation | None:
    found = names_in(class_of(module).forward, _LINEAR)
    return None if found is None else BorrowedLinear(module)


def _is_transposed(module: Any) -> bool:
    return find(module, _TRANSPOSED_LINEARS) is not None and module.bias is not None


def _with_adapters(module: Any) -> FusibleOperation | None:
    if not is_adapted(module):
        return None
    if adapters_of(module):
        return products(module)
    found = part(base_of(module))
    return found[0] if len(found) == 1 else None


register_view(_with_adapters)


def _transposed_linear(module: Any) -> FusibleOperation | None:
    if not _is_transposed(module):
        return None
    return BorrowedLinear(module, is_transposed=True)


def _layer_scale(module: Any) -> FusibleOperation | None:
    names = find(module, _LAYER_SCALES)
    if names is None or getattr(module, names.get("inplace", ""), False):
        return None
    if not _is_channels(getattr(module, names["gamma"])):
        return None
    return BorrowedLayerScale(module, names["gamma"])


def _is_channels(factor: Any) -> bool:
    """Whether it is a parameter with a number for each channel."""
    return isinstance(factor, nn.Parameter) and factor.dim() == 1 and len(factor) > 1


def _drop_path(module: Any) -> FusibleOperation | None:
    function = class_of(module).forward
    names = names_in(function, _DROP_PATH)
    if names is None:
        names = find(module, (_CALLS_DROP_PATH,))
        called = getattr(function, "__globals__", {}).get("drop_path")
        if names is None or names_in(called, _DROP_PATH_FUNCTION) is None:
            return None
        if not getattr(module, names["scales"]):
            raise FuseSkip("it drops paths without a factor for the others")
    check_number(module, names["p"])
    return BorrowedDropPath(module, names["p"])


def ops_of_method(module: nn.Module, name: str) -> list[FusibleOperation]:
    """The ops of the steps that are a whole method of a module. FuseSkip for another method."""
    method = getattr(class_of(module), name)
    names = None if hasattr(method, "__wrapped__") else _STEPS.match_all(method)
    if names is None:
        raise unknown(module)
    steps: Any = names["steps"]
    return ops_of(module, steps)


def _steps_of(sequential: nn.Module) -> Iterator[nn.Module]:
    """`children()` would give a module only once, and leave out None."""
    for step in sequential._modules.values():
        if step is None:
            raise FuseSkip("a step of its Sequential is None")
        yield step


def part(module: nn.Module) -> list[FusibleOperation]:
    """The ops of a submodule. FuseSkip for one that is not known."""
    if is_torch(module, nn.Identity):
        return []
    if is_torch(module, nn.Sequential):
        return [op for inner in _steps_of(module) for op in part(inner)]
    try:
        return [view(module)]
    except ValueError as error:
        raise FuseSkip(str(error).removeprefix("[view] ")) from None
    except TypeError:
        pass
    makers = (
        _activation,
        norm,
        _layer_scale,
        _drop_path,
        _transposed_linear,
        _linear_in_two,
        _linear_in_4_bits,
    )
    for make in makers:
        op = make(module)
        if op is not None:
            return [op]
    return ops_of_method(module, "forward")


def _global(module: nn.Module, name: str) -> list[FusibleOperation]:
    """The ops of a module that a function knows by the name of a global variable."""
    obstacle = find_obstacle(module, class_of(module).forward, module._parameters)
    if obstacle is None and (module._parameters or module._modules):
        obstacle = "it has parameters or submodules"
    if obstacle is not None:
        raise FuseSkip(f"{name}: {obstacle}")
    return part(module)


# ---- steps


def linear(module: Any) -> nn.Linear:
    """The module, or the base of its adapters, if it is a `torch.nn.Linear` that ops know; else
    FuseSkip with the reason."""
    module = base_of(module)
    if names_in(class_of(module).forward, _LINEAR_IN_8_BITS) is not None:
        raise FuseSkip(f"{name_of(module)} rounds its input to int8 as well as its weight")
    if not is_torch(module, nn.Linear) and not _is_in_4_bits(module):
        raise FuseSkip(f"{name_of(module)} is not a torch.nn.Linear")
    try:
        check_linear(weight_of(module), module.bias)
    except ValueError as error:
        raise FuseSkip(str(error).removeprefix("[view] ")) from None
    found: nn.Linear = module
    return found


def products(*modules: Any) -> FusibleOperation:
    """The products of modules that `linear` knows, side by side, with their adapters."""
    found = []
    for module in modules:
        base = base_of(module)
        is_transposed = _is_transposed(base)
        if not is_transposed:
            linear(base)
        found.append(Adapted(module, base, adapters_of(module), is_transposed))
    dropouts = [one.dropout for part in found for one in part.adapters]
    if not dropouts:
        bases = [one.base for one in found]
        if len(bases) > 1:
            return BorrowedPackedLinear(*bases)
        return BorrowedLinear(bases[0], is_transposed=found[0].is_transposed)
    if len({(getattr(one, "p", 0.0), one.training) for one in dropouts}) > 1:
        raise FuseSkip("its adapters drop with different probabilities")
    pairs = ((one.a.weight, one.b.weight) for part in found for one in part.adapters)
    if len({weight.dtype for pair in pairs for weight in pair}) > 1:
        raise FuseSkip("its adapters have different dtypes")
    if len({one.has_bias for one in found}) > 1:
        raise FuseSkip("some of its products have a bias, and some have none")
    return BorrowedLoRALinear(*found)


def dtypes_of(*modules: nn.Linear) -> set[torch.dtype]:
    """The dtypes of the parameters of linear layers."""
    found = {weight_of(one).dtype for one in modules}
    return found | {one.bias.dtype for one in modules if one.bias is not None}


def _gated(module: Any, names: Names) -> list[FusibleOperation]:
    layers = [getattr(module, names[name]) for name in ("gate", "up")]
    gate, up = map(linear, layers)
    if len(dtypes_of(gate, up)) > 1:
        raise FuseSkip("gate and up have different dtypes")
    if (gate.bias is None) != (up.bias is None):
        raise FuseSkip("only one of gate and up has a bias")
    if weight_of(gate).shape != weight_of(up).shape:
        raise FuseSkip("gate and up have different shapes")
    return [products(*layers), *_gated_half(module, names)]


def _gated_half(module: Any, names: Names) -> list[FusibleOperation]:
    act: Any = names["act"]
    return [_gated_unit(ops_of(module, act))]


def _gated_half_or_last(module: Any, names: Names) -> list[FusibleOperation]:
    if getattr(module, names["is_last"]) or getattr(module, names["dim"]) != -1:
        raise FuseSkip("its gate is the second half")
    return _gated_half(module, names)


def _factor(module: Any, names: Names) -> list[FusibleOperation]:
    factor = getattr(module, names["factor"])
    if _is_channels(factor):
        return [BorrowedLayerScale(module, names["factor"])]
    check_number(module, names["factor"])
    return [ConstantScale(float(factor))]


def _optional_factor(module: Any, names: Names) -> list[FusibleOperation]:
    return [] if getattr(module, names["factor"]) is None else _factor(module, names)


def _dropout(module: Any, names: Names) -> list[FusibleOperation]:
    check_number(module, names["p"])
    return [BorrowedDropout(module, names["p"])]


def _gelu(module: Any, names: Names) -> list[FusibleOperation]:
    return [GELU(getattr(getattr(module, names["config"]), names["approximate"]))]


def _part(module: Any, names: Names) -> list[FusibleOperation]:
    found = getattr(module, names["part"], None)
    if not isinstance(found, nn.Module):
        raise FuseUnfit(f"{names['part']} is no module")
    return part(found)


def _product_of_its_dtype(module: Any, names: Names) -> list[FusibleOperation]:
    linear(getattr(module, names["part"]))
    return _part(module, names)


def _part_if(module: Any, names: Names) -> list[FusibleOperation]:
    return _part(module, names) if _is_on(module, names["flag"]) else []


def _part_if_not(module: Any, names: Names) -> list[FusibleOperation]:
    return [] if _is_on(module, names["flag"]) else _part(module, names)


def _is_on(module: Any, name: str) -> bool:
    flag = getattr(module, name)
    if not isinstance(flag, bool):
        raise FuseSkip(f"{name} is no bool")
    return flag


def _chunks(module: Any, names: Names) -> list[FusibleOperation]:
    """A method on parts of a sequence, or on the whole where their size is 0 (transformers)."""
    if getattr(module, names["size"]) != 0:
        raise FuseSkip(f"{names['size']} is not 0")
    make = _of_methods.get(names["chunk"])
    return ops_of_method(module, names["chunk"]) if make is None else make(module)


# The methods of other forms than steps -> what makes their ops.
_of_methods: dict[str, Callable[[Any], list[FusibleOperation]]] = {}


def register_method(name: str, make: Callable[[Any], list[FusibleOperation]]) -> None:
    """Says what makes the ops of a method of this name."""
    _of_methods[name] = make


def _op(make: MakeOp) -> Callable[[Any, Names], list[FusibleOperation]]:
    return lambda module, names: [make()]


_HALVES = "_.chunk(2, dim={0})[0]", "_.chunk(2, dim={0})[1]"
_GATE_FIRST = "any_act({}) * {}".format(*_HALVES)
_GATE_LAST = "{} * any_act({})".format(*_HALVES)

register_step("any_act(self.any_gate(_)) * self.any_up(_)", _gated)
register_step(_GATE_FIRST.format("-1"), _gated_half)
register_step(
    f"{_GATE_LAST} if self.any_is_last else {_GATE_FIRST}".format("self.any_dim"),
    _gated_half_or_last,
)
register_step("F.silu(_)", _op(SiLU))
register_step("F.relu(_)", _op(ReLU))
register_step("F.relu(_).square()", _op(SReLU))
register_step("torch.square(F.relu(_))", _op(SReLU))
register_step("F.gelu(_)", _op(functools.partial(GELU, "none")))
register_step("F.gelu(_, approximate='tanh')", _op(GELU))
register_step("F.gelu(_, approximate=self.any_config.any_approximate)", _gelu)
register_step("F.dropout(_, p=self.any_p, training=self.training)", _dropout)
register_step("F.dropout(_, self.any_p, training=self.training)", _dropout)
register_step("_ * self.any_factor", _factor)
register_step("_ * self.any_factor if self.any_factor is not None else _", _optional_factor)
# T5's; products take their input to the dtype of their weight.
register_step(
    "self.any_part(_.to(self.any_part.weight.dtype) if isinstance(self.any_part.weight, "
    "torch.Tensor) and _.dtype != self.any_part.weight.dtype and self.any_part.weight.dtype != "
    "torch.int8 else _)",
    _product_of_its_dtype,
)
register_step("self.any_part(_)", _part)
register_step("self.any_part(_) if self.any_flag else _", _part_if)
register_step("self.any_part(_) if not self.any_flag else _", _part_if_not)
register_global(_global)
register_step("apply_chunking_to_forward(self.any_chunk, self.any_size, self.any_dim, _)", _chunks)
