"""The experts of transformers: modules with stacked weights, which their block calls with the rows
of tokens, the ids of their experts, and the probabilities of these."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..op.base import BasicOperation, FusibleOperation
from ..op.borrowed import Borrowed, class_of
from ..ops.activation import SiLU, SReLU
from ..ops.dispatch import Combine, Dispatch
from ..ops.glu import SwiGLU
from ..ops.grouped_linear import GroupedLinear
from ..ops.scaled_activation import ScaledClampedQGeGLU, ScaledSReLU, ScaledSwiGLU
from .facts import Facts, Watcher
from .parts import ops_of_method, part
from .pattern import Names, Pattern
from .reads import cell_of, reads_of_function
from .rules import FuseSkip, FuseUnfit, register_fuse_rule
from .whole import check_number

# The `forward` that the decorator of transformers gives classes of experts.
_CHOICE = Pattern(
    """
    C = experts_interface.get_interface(self.config._experts_implementation, original_forward)
    return C(self, *args, **kwargs)
    """
)
# The implementation that models have by default, and the module of its function.
_DEFAULT, _HOME = "grouped_mm", "transformers.integrations.moe"
# What the function of that name reads of the experts. Attributes say what it computes.
_READ = {
    "_apply_gate",
    "_is_expert_parallel",
    "act_fn",
    "down_proj",
    "down_proj_bias",
    "gate_up_proj",
    "gate_up_proj_bias",
    "has_bias",
    "has_gate",
    "has_post_expert_norm",
    "is_transposed",
    "num_experts",
    "post_expert_norm",
    "up_proj",
    "up_proj_bias",
}
_FLAGS = sorted(name for name in _READ if name.startswith(("has_", "is_", "_is_")))

# Clamped units, on the halves of a row.
_CLAMPED = """
G, U = H.chunk(2, dim=-1)
G = G.clamp({}max=self.any_limit)
U = U.clamp(min=-self.any_limit, max=self.any_limit)
return {}
"""
# The product -> what is added to its second factor.
_PRODUCTS = {
    "(U + 1) * (G * torch.sigmoid(G * self.any_alpha))": 1.0,
    "F.silu(G) * U": 0.0,
    "self.any_act(G) * U": 0.0,
}
_CLAMPED_UNITS = [
    (Pattern(_CLAMPED.format(least, product)), offset)
    for product, offset in _PRODUCTS.items()
    for least in ("", "min=None, ")
]


class BorrowedExperts(Watcher, Borrowed, GroupedLinear):
    """A product of experts; `name`: that of its stacked weight."""

    bias = None
    accumulate_into_main_grad = False
    delay_wgrad_compute = False
    single_grouped_weight = True
    single_grouped_bias = True
    num_extra_inputs = 1
    _rng_state_tracker_function = None
    # These scales would have no place in a state dict.
    _takes_scales = False

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__(owner)
        self.__dict__["_name"] = name

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        found: nn.Parameter = getattr(self._parameter_owner, self.__dict__["_name"])
        return found

    @property
    def num_groups(self) -> int:  # type: ignore[override]
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[2]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return (self.__dict__["_name"],)

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [(self._parameter_owner, self.__dict__["_name"]), (self, "bias")]

    def add_facts(self, facts: Facts) -> None:
        owner = self._parameter_owner
        choice = _choice_of(class_of(owner).forward)
        assert choice is not None
        facts.add_function(choice, owner, "the experts")
        interface = _interface_of(choice)
        for table in (interface._local_mapping, interface._global_mapping):
            facts.add_value(table, _DEFAULT, f"the function of {_DEFAULT}")
        facts.add_function(interface[_DEFAULT], owner, "the experts")


@functools.lru_cache(maxsize=256)
def _choice_of(forward: Any) -> types.FunctionType | None:
    """The function that chooses an implementation, which is wrapped around the `forward` that its
    source seems to have; None for another `forward`."""
    if not isinstance(forward, types.FunctionType) or not hasattr(forward, "__wrapped__"):
        return None
    found = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__code__.co_name, None, forward.__closure__
    )
    return None if _CHOICE.match_text(found) is None else found


def _interface_of(choice: Any) -> Any:
    cell = cell_of(choice, "experts_interface")
    assert cell is not None
    return cell.cell_contents


def _check_implementation(module: Any) -> None:
    """FuseSkip unless calls reach the function of the default implementation."""
    if module.config._experts_implementation != _DEFAULT:
        raise FuseSkip(f"its implementation is {module.config._experts_implementation}")
    choice = _choice_of(class_of(module).forward)
    function = _interface_of(choice)[_DEFAULT]
    own = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    reads = reads_of_function(function).own if own == (_HOME, f"{_DEFAULT}_experts_forward") else ()
    if not reads or {chain[0] for chain in reads} - _READ:
        raise FuseSkip(f"the function of {_DEFAULT} is another one")
    for name in _FLAGS:
        if not isinstance(getattr(module, name), bool):
            raise FuseSkip(f"{name} is no bool")
    # Ops would copy transposed weights, and biases keep their products from being one step.
    for name in ("_is_expert_parallel", "has_bias", "has_post_expert_norm", "is_transposed"):
        if getattr(module, name):
            raise FuseSkip(f"{name} is set")


def experts(owner: Any) -> list[FusibleOperation]:
    """The ops of a module of experts, which take ids and probabilities as extra inputs. FuseUnfit
    for another module."""
    if not isinstance(owner, nn.Module) or _choice_of(class_of(owner).forward) is None:
        raise FuseUnfit("it calls no experts")
    module: Any = owner
    _check_implementation(module)
    up, down = (
        BorrowedExperts(module, name)
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    )
    count, hidden = module.num_experts, down.in_features
    wanted = (count, hidden * (2 if module.has_gate else 1), down.out_features)
    if tuple(up.weight.shape) != wanted or down.num_groups != count:
        shapes = [list(one.weight.shape) for one in (up, down)]
        raise FuseSkip(f"weights of {shapes[0]} and {shapes[1]} are not those of {count} experts")
    dispatch, activation, combine = Dispatch(count), _activation(module), Combine()
    for k, name in enumerate(("splits", "probs", "positions")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    for op, name in (
        (up, "splits"),
        (activation, "probs"),
        (down, "splits"),
        (combine, "positions"),
    ):
        op.set_extra_input_channel(0, name)
    return [dispatch, up, activation, down, combine]


def _activation(module: Any) -> BasicOperation:
    """Between the products, times the probabilities."""
    if not module.has_gate:
        found = part(module.act_fn)
    else:
        clamped = _clamped(module)
        if clamped is not None:
            return clamped
        found = ops_of_method(module, "_apply_gate")
    kinds: dict[type, type[BasicOperation]] = {SwiGLU: ScaledSwiGLU, SReLU: ScaledSReLU}
    scaled = kinds.get(type(found[0])) if len(found) == 1 else None
    if scaled is None:
        unit = ", ".join(type(op).__name__ for op in found)
        raise FuseSkip(f"there is no op for {unit} times probabilities")
    return scaled()


def _clamped(module: Any) -> BasicOperation | None:
    for pattern, offset in _CLAMPED_UNITS:
        names = pattern.match_all(class_of(module)._apply_gate)
        if names is None:
            continue
        if "act" in names and not isinstance(part(getattr(module, names["act"]))[0], SiLU):
            raise FuseSkip("its clamped unit has another activation than SiLU")
        numbers = [names[name] for name in ("limit", "alpha") if name in names]
        for name in numbers:
            check_number(module, name)
        limit, alpha = (*(getattr(module, name) for name in numbers), 1.0)[:2]
        return ScaledClampedQGeGLU(limit=limit, alpha=alpha, glu_linear_offset=offset)
    return None


def _experts(module: Any, names: Names) -> Sequence[nn.Module]:
    return experts(getattr(module, names["experts"], None))


register_fuse_rule("experts", "H = self.any_experts(H, I, W)", _experts)
