"""The base class of modules that the fuser can plan and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn, no_grad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy

from ..base.constructors import names_its_arguments
from ..base.guard_groups import untraced
from ..base.handles import handles
from ..base.marks import disabled, may_be_traced
from ..quantization import scales
from ..quantization.quantized_tensor import QuantizedTensor
from . import methods
from .context import OperationContext
from .fx import symbolic_call
from .observers import KEPT_DICTS, ObservedMixin
from .state_dict import shape_mismatches, take_extra_state, without_pre_hooks

# (name of the op, name of the attribute, value) -> the value to store. Raises ValueError.
Check = Callable[[str, str, object], Any]

# Attributes that belong to one process and one set of groups, and are never copied.
_TRANSIENT = (
    "_own_group",
    "_channels_captured",
    "_number",
    "_traced_number",
    "_observers",
    "_is_watched",
    "_delayed",
    "_placements_checked",
    scales.RUN,
)

# How an op is called alone: the group that is made for it, and the function that Dynamo sees.
_make_group: Callable[[FusibleOperation], Any]
_traced_alone: Callable[..., Any]


def run_alone_by(
    make_group: Callable[[FusibleOperation], Any], traced_alone: Callable[..., Any]
) -> None:
    """The layer above calls this once. It sets how an op is called alone, in eager mode and under
    torch.compile."""
    global _make_group, _traced_alone
    _make_group, _traced_alone = make_group, traced_alone


# The mixin comes last, because compiled graphs guard on each class that is searched before
# nn.Module.
@names_its_arguments
class FusibleOperation(nn.Module, ObservedMixin):
    """A tensor operation that the fuser may plan: a basic op, a container, or a fused op.

    A call runs it as a group of its own.
    """

    _is_contract: ClassVar[bool] = True
    _own_group: Any = None
    _number: int
    # The same for traces. An int of a module that FSDP manages would become symbolic in Dynamo.
    _traced_number: str
    # Whether keyword arguments of a call may name tensors to write to.
    _takes_buffers: ClassVar[bool] = False
    # If the parameters are DTensors: does each rank have its own experts? Is the gradient on each
    # rank a part of the sum over all?
    _are_experts_shared: bool = False
    _has_partial_gradients: bool = False
    # Whether delayed scaling stores scales with its parameters.
    _takes_scales: ClassVar[bool] = False

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    # The checks of attributes when they are set, in the constructor and later.
    _checks: ClassVar[Mapping[str, Check]] = {}
    # The checks of the class and its bases.
    _all_checks: ClassVar[dict[str, Check]] = {}

    # Attributes that decide how a group runs its ops, not only its plans.
    _fixed_once_captured: ClassVar[tuple[str, ...]] = ()

    # These are set for each subclass when it is defined.
    _python_forward: ClassVar[methods.Implementation | None] = None
    _python_backward: ClassVar[methods.Family | None] = None
    _accepted_keywords: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_its_arguments(cls)
        methods.check_methods(cls)
        families = cls._method_families()
        cls._python_forward = methods.forward_implementation(cls, families)
        cls._python_backward = methods.backward_family(cls, families)
        cls._accepted_keywords = methods.accepted_keywords(cls)
        cls._all_checks = cls._inherited_checks()

    @classmethod
    def _inherited_checks(cls) -> dict[str, Check]:
        found: dict[str, Check] = {}
        for klass in reversed(cls.__mro__):
            found.update(vars(klass).get("_checks", {}))
        return found

    @classmethod
    def _method_families(cls) -> tuple[methods.Family, ...]:
        # The op_* methods do not support extra tensors.
        if cls.num_extra_inputs or cls.num_extra_outputs:
            return ("fuser",)
        return methods.FAMILIES

    @classmethod
    def _forward_style(cls, family: methods.Family | None = None) -> methods.Style | None:
        """Returns "single", "split", or None if the user's part of the class defines no forward."""
        if family is not None:
            return methods.forward_style(cls, family)
        return cls._python_forward.style if cls._python_forward is not None else None

    @property
    def is_fused_op(self) -> bool:
        """Whether this is a `FusedOperation`."""
        return False

    @property
    def is_python(self) -> bool:
        """Whether a Python method of the user runs its forward or its backward."""
        return self._python_forward is not None or self._python_backward is not None

    @property
    def basic_ops(self) -> list[Any]:  # BasicOperation, in the module above
        """The basic ops that it consists of, in order."""
        raise NotImplementedError(f"[{type(self).__name__}] basic_ops must be defined, got none")

    def __init__(self) -> None:
        super().__init__()
        self._add_number()

    def _add_number(self) -> None:
        # This bypasses __setattr__, because the number is not part of the plans.
        number = handles.add(self)
        self.__dict__.update(_number=number, _traced_number=str(number))

    def _make_own_group(self) -> Any:
        if self._own_group is None:
            self.__dict__["_own_group"] = _make_group(self)
        return self._own_group

    def _state(self) -> str:
        """The same text for all ops that one compiled graph can serve when they are called
        alone."""
        state: str = self._make_own_group()._shared_state()
        return state

    # Everything that a compiled graph guards on, besides what it reads from the op.
    _traced_state = property(untraced(_state))

    @property
    def _has_own_forward(self) -> bool:
        """Whether a subclass or the instance overrides `forward`, which a group must then call."""
        cls = type(self)
        if cls.__call__ is not nn.Module.__call__:
            return True
        forward = self.__dict__.get("forward")
        if forward is None:
            return cls.forward is not FusibleOperation.forward
        # Undoing a patch may leave the method as an attribute of the instance.
        is_ours = getattr(forward, "__func__", None) is FusibleOperation.forward
        return not (is_ours and forward.__self__ is self)

    def _absent_parameters(self) -> list[str]:
        """The parameters that are None now. A functional call might replace them although no call
        reads them."""
        if self.is_python:
            return []
        rows = self._parameters.items()
        return [name for name, parameter in rows if parameter is None and not self._reads(name)]

    def _reads(self, parameter: str) -> bool:
        """Whether each call reads the parameter, also if it is None."""
        return False

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Runs this op alone: `input`, its extra inputs in order, and keyword arguments for the op.

        Returns a tensor, or a flat tuple (output, extra outputs...).
        """
        if isinstance(input, Proxy):
            return symbolic_call(self, input, extra_inputs, kwargs)
        if kwargs and self._takes_buffers:
            call = self._call_into if may_be_traced() else self._run_into
            return call(input, extra_inputs, kwargs)
        if is_compiling():
            return _traced_alone(self, input, extra_inputs, kwargs)
        group = self._own_group
        if group is None:
            group = self._make_own_group()
        if kwargs:
            return group(input, *extra_inputs, basic_op_kwargs=[kwargs])
        # The fastest way: C++ returns None if Python has to handle the call.
        output = group._call(input, *extra_inputs)
        if output is not None:
            return output
        return group(input, *extra_inputs)

    def _slow_forward(self, *input: Any, **kwargs: Any) -> Any:
        # torch.jit.trace checks its graph without gradients, and compares all calls. An op of the
        # graph has its gradient in any case.
        with no_grad():
            return super()._slow_forward(*input, **kwargs)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor | None, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        """Single style: computes, and saves tensors in the contexts.

        Lists have one entry for each basic op. Returns (output, extra outputs of each basic op).
        """
        raise NotImplementedError(f"[{type(self).__name__}] fuser_forward must be defined")

    def fuser_forward_compute(
        self,
        input_: Tensor,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor | None, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]], Any]:
        """Split style, first half, pure: returns (output, extra outputs, tensors to save)."""
        raise NotImplementedError(f"[{type(self).__name__}] fuser_forward_compute must be defined")

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        tensors_to_save: Any,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor | None, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        """Split style, second half: saves what compute returned in the contexts."""
        raise NotImplementedError(f"[{type(self).__name__}] fuser_forward_save_ctx must be defined")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        """Returns the gradients of (input, parameters of each basic op, extra inputs of each basic
        op)."""
        raise NotImplementedError(f"[{type(self).__name__}] fuser_backward must be defined")

    @disabled("buffers of the caller's must be given outside of compiled code")
    def _call_into(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], buffers: dict[str, Any]
    ) -> Tensor:
        return self._run_into(input, extra_inputs, buffers)

    def _run_into(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], buffers: dict[str, Any]
    ) -> Tensor:
        """A call that writes to buffers of the caller, which are given by name."""
        raise NotImplementedError(f"[{type(self).__name__}] _run_into must be defined")

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._all_checks.get(name)
        if check is not None:
            value = check(type(self).__name__, name, value)
        if name == "training":
            value = bool(value)
        if name in self._fixed_once_captured and self.__dict__.get("_channels_captured", False):
            raise RuntimeError(
                f"[{type(self).__name__}] {name} must be set before a group captures the op, "
                f"got {value!r} afterwards"
            )
        if self._is_seen_at_the_call(name, value):
            super().__setattr__(name, value)
        elif is_dynamo_compiling():
            self._set_untraced(name, value)
        else:
            with self._noting_changes():
                super().__setattr__(name, value)

    @disabled("attributes of an op must be set outside of compiled code")
    def _set_untraced(self, name: str, value: Any) -> None:
        # A trace sets this on the op itself, which has its new value when the traced call ends.
        setattr(self, name, value)

    def _is_seen_at_the_call(self, name: str, value: Any) -> bool:
        """Whether the next call sees the new value without being told."""
        # A replica of DataParallel that is being made has no parameters yet.
        known = self.__dict__.get("_parameters", {}).get(name)
        if isinstance(value, Tensor) and known is not None:
            return not self._is_watched or value.shape == known.shape
        if name[0] == "_":
            return name != "__class__" and name not in KEPT_DICTS
        return name == "training"

    def __delattr__(self, name: str) -> None:
        with self._noting_changes():
            super().__delattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def apply(tensor: Tensor) -> Tensor:
            return tensor.moved(fn) if isinstance(tensor, QuantizedTensor) else fn(tensor)

        super()._apply(apply, recurse)
        scales.move_scales(self, fn)
        return self

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Same as `nn.Module.named_buffers`; with `recurse=False` it includes the scales of delayed
        scaling."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            start = prefix + "." if prefix else ""
            yield from ((start + name, tensor) for name, tensor in scales.tensors_of(self))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales.save_scales(self, destination, prefix, keep_vars)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Same as `nn.Module.register_parameter`; groups of the op see the parameter."""
        with self._noting_changes():
            super().register_parameter(name, param)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        for name in _TRANSIENT:
            replica.__dict__.pop(name, None)
        replica._add_number()
        return replica

    def __getstate__(self) -> dict[str, Any]:
        # This omits what Module.compile() stores, which would run the original.
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._add_number()
        scales.register_copy(self)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        lists = (missing_keys, unexpected_keys, error_msgs)
        # Hooks run first, because they may edit what is loaded.
        for hook in list(self._load_state_dict_pre_hooks.values()):
            hook(state_dict, prefix, local_metadata, strict, *lists)
        # A subclass with its own extra state handles it itself.
        if type(self).set_extra_state is nn.Module.set_extra_state:
            take_extra_state(state_dict, prefix + "_extra_state", unexpected_keys)
        mismatches = shape_mismatches(self, state_dict, prefix)
        if mismatches:
            # If one of its tensors does not fit, an op does not change.
            error_msgs.extend(mismatches)
            return
        if self._takes_scales:
            scales.make_room(self, state_dict, prefix)
        with without_pre_hooks(self):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        if self._takes_scales:
            scales.load_scales(self, state_dict, prefix, unexpected_keys)
