"""Base classes of ops: what a module must offer so that the fuser can plan and run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import methods
from .channels import ChannelMixin
from .state_dict import drop_if_empty, shape_mismatches

Attribute = bool | int | float | str | list[int]

# Attributes that belong to one process and one set of groups, never to a copy.
_TRANSIENT = ("_own_group", "_channels_captured", "_number")


class OperationContext:
    """What one op keeps between its forward and its backward; any attribute may be set on it.

    `dtype` is the compute dtype of the op, `requires_grad` whether its backward will run,
    `saved_tensors` what forward saved (in backward only; slot order for a native op).
    """

    def __init__(self, *, requires_grad: bool = True, dtype: torch.dtype | None = None) -> None:
        self.requires_grad = requires_grad
        self.dtype = dtype
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward, where `saved_tensors` gives them in this order."""
        self.to_save = tensors

    def _bind(self, saved_tensors: tuple[Tensor | None, ...]) -> OperationContext:
        """A fresh context for one backward: Dynamo refuses to mutate the one made in forward."""
        return _BackwardContext(self, saved_tensors)


class _BackwardContext(OperationContext):
    """Saved tensors of one backward over the attributes that forward set."""

    def __init__(self, forward: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._forward = forward
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "_forward":  # not set yet while copying
            raise AttributeError(name)
        return getattr(self._forward, name)


def unpacked(op: nn.Module, method: str, returned: Any, names: str) -> tuple[Any, ...]:
    """What a method returned, RuntimeError unless it is a tuple (or list) of what `names` lists."""
    count = names.count(",") + 1
    got = type(returned).__name__
    if isinstance(returned, tuple | list):
        if len(returned) == count:
            return tuple(returned)
        got = f"{len(returned)} values"
    raise RuntimeError(f"[{type(op).__name__}] {method} must return ({names}), got {got}")


class FusibleOperation(nn.Module):
    """A tensor operation that the fuser may plan: a basic op, a container, or a fused op.

    Calling it runs it as a group of its own.
    """

    _is_contract: ClassVar[bool] = True
    _own_group: Any = None

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    # What decides how a group runs its ops, and not only its plans.
    _fixed_once_captured: ClassVar[tuple[str, ...]] = ()

    # Set for each subclass when it is defined.
    _python_forward: ClassVar[methods.Implementation | None] = None
    _python_backward: ClassVar[methods.Family | None] = None
    _accepted_keywords: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        methods.check_methods(cls)
        families = cls._method_families()
        cls._python_forward = methods.forward_implementation(cls, families)
        cls._python_backward = methods.backward_family(cls, families)
        cls._accepted_keywords = methods.accepted_keywords(cls)

    @classmethod
    def _method_families(cls) -> tuple[methods.Family, ...]:
        # op_* methods have no place for extra tensors.
        if cls.num_extra_inputs or cls.num_extra_outputs:
            return ("fuser",)
        return methods.FAMILIES

    @classmethod
    def _forward_style(cls, family: methods.Family | None = None) -> methods.Style | None:
        """ "single", "split", or None where the user's part of the class defines no forward."""
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
    def basic_ops(self) -> list[BasicOperation]:
        """The basic ops it stands for, in order."""
        raise NotImplementedError(f"[{type(self).__name__}] basic_ops must be defined, got none")

    def __init__(self) -> None:
        super().__init__()
        self._add_number()

    def _add_number(self) -> None:
        from .traced import numbered

        # Past __setattr__: no part of the plans.
        self.__dict__["_number"] = numbered.add(self)

    def _make_own_group(self) -> Any:
        from .fuser import OperationFuser

        if self._own_group is None:
            self.__dict__["_own_group"] = OperationFuser([self])
        return self._own_group

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Run this op alone: `input`, its extra inputs in order, keyword arguments for the op.

        Returns a tensor, or a flat tuple (output, extra outputs...).
        """
        if torch.compiler.is_compiling():
            from .fuser import traced_alone

            return traced_alone(self, input, extra_inputs, kwargs)
        group = self._own_group
        if group is None:
            group = self._make_own_group()
        if kwargs:
            return group(input, *extra_inputs, basic_op_kwargs=[kwargs])
        return group(input, *extra_inputs)

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
        """Single style: compute, and save into the contexts.

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
        """Split style, first half, pure: (output, extra outputs, tensors to save)."""
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
        """Split style, second half: put what compute returned into the contexts."""
        raise NotImplementedError(f"[{type(self).__name__}] fuser_forward_save_ctx must be defined")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        """Gradients of (input, parameters of each basic op, extra inputs of each basic op)."""
        raise NotImplementedError(f"[{type(self).__name__}] fuser_backward must be defined")

    def __setattr__(self, name: str, value: Any) -> None:
        captured = self.__dict__.get("_channels_captured", False)
        if captured and name in self._fixed_once_captured:
            raise RuntimeError(
                f"[{type(self).__name__}] {name} must be set before a group captures the op, "
                f"got {value!r} afterwards"
            )
        super().__setattr__(name, value)
        # Constructor state of a native op is part of the plans of the groups that hold it.
        if captured and name != "training" and name[0] != "_" and not self.is_python:
            from . import registry

            if not isinstance(value, Tensor | nn.Module):
                registry.invalidate_plans()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._add_number()

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
        # A subclass with an extra state of its own gets to see it.
        if type(self).set_extra_state is nn.Module.set_extra_state:
            drop_if_empty(state_dict, prefix + "_extra_state")
        mismatches = shape_mismatches(self, state_dict, prefix)
        if mismatches:
            # Nothing of an op changes when one of its tensors does not fit.
            error_msgs.extend(mismatches)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class BasicOperation(ChannelMixin, FusibleOperation):
    """One op: native (`_kind` names its C++ declaration) or defined by the user in Python.

    A Python op implements `op_forward`, or the pair `op_forward_compute` and
    `op_forward_save_ctx`, and `op_backward`. With extra tensors (`num_extra_inputs`,
    `num_extra_outputs`) it implements the `fuser_*` methods of `FusibleOperation` instead.
    Half a pair, or a pair and the single method in one class body, is a TypeError when the
    class is defined; otherwise the most derived definition is the one that runs.
    """

    _is_contract: ClassVar[bool] = True
    _kind: ClassVar[str | None] = None
    _parameter_names: ClassVar[tuple[str, ...]] = ()

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def _attributes(self) -> dict[str, Attribute]:
        """Constructor state that the planner of a native op needs."""
        return {}

    @property
    def _parameter_owner(self) -> nn.Module:
        """The module that carries the parameters, looked up at every call."""
        return self

    def _parameter_tensors(self) -> list[Tensor]:
        """Current tensors of the parameters, in the order in which backward gives gradients.

        A parametrized parameter stands for the tensor that its parametrization computes.
        """
        owner = self._parameter_owner
        if self._kind is not None and self._python_backward is None:
            return [getattr(owner, name) for name in self._parameter_names]
        parametrizations = getattr(owner, "parametrizations", None)
        if parametrizations is None:
            return list(self.parameters())
        skipped = {id(parameter) for parameter in parametrizations.parameters()}
        plain = [p for p in self.parameters() if id(p) not in skipped]
        return plain + [getattr(owner, name) for name in parametrizations]

    @property
    def basic_ops(self) -> list[BasicOperation]:
        return [self]

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Single style: the output; what backward needs goes into `ctx`."""
        raise NotImplementedError(f"[{type(self).__name__}] op_forward must be defined")

    def op_forward_compute(
        self,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Split style, first half, pure: (output, tensors to save)."""
        raise NotImplementedError(f"[{type(self).__name__}] op_forward_compute must be defined")

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Tensor,
        tensors_to_save: Any,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> None:
        """Split style, second half: put what compute returned into `ctx`."""
        raise NotImplementedError(f"[{type(self).__name__}] op_forward_save_ctx must be defined")

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """(gradient of the input, gradients of the parameters in the order of `parameters()`)."""
        raise NotImplementedError(f"[{type(self).__name__}] op_backward must be defined")

    def _check_no_extra_tensors(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"[{type(self).__name__}] an op with extra tensors must define {method}, "
                f"got {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} outputs"
            )

    def _keywords(self, method: str, offered: dict[str, Any]) -> dict[str, Any]:
        accepted = self._accepted_keywords[method]
        return {name: value for name, value in offered.items() if name in accepted}

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
        self._check_no_extra_tensors("fuser_forward")
        offered = {
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        keywords = self._keywords("op_forward", offered)
        output = self.op_forward(basic_op_ctxs[0], input_, **keywords, **basic_op_kwargs[0])
        return output, [()]

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
        self._check_no_extra_tensors("fuser_forward_compute and fuser_forward_save_ctx")
        offered = {
            "requires_grad": requires_grad[0],
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        keywords = self._keywords("op_forward_compute", offered)
        found = self.op_forward_compute(input_, **keywords, **basic_op_kwargs[0])
        what = "output, tensors to save"
        output, to_save = unpacked(self, "op_forward_compute", found, what)
        return output, [()], to_save

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
        offered = {
            "requires_grad": requires_grad[0],
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        keywords = self._keywords("op_forward_save_ctx", offered)
        self.op_forward_save_ctx(
            basic_op_ctxs[0], input_, tensors_to_save, **keywords, **basic_op_kwargs[0]
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        self._check_no_extra_tensors("fuser_backward")
        found = self.op_backward(basic_op_ctxs[0], grad_output)
        what = "input gradient, parameter gradients"
        grad_input, grad_parameters = unpacked(self, "op_backward", found, what)
        return grad_input, [grad_parameters], [()]


class FusedOperation(FusibleOperation):
    """Several basic ops run as one step by Python methods of the user.

    A subclass implements `fuser_forward`, or the pair `fuser_forward_compute` and
    `fuser_forward_save_ctx`, or `fuser_backward`, or a forward and a backward. It owns no
    parameters: those stay with `basic_ops`.
    """

    _is_contract: ClassVar[bool] = True

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        """Raises TypeError unless `basic_ops` is a list of basic ops, ValueError if it is empty."""
        super().__init__()
        name = type(self).__name__
        if not isinstance(basic_ops, Iterable):
            raise TypeError(f"[{name}] basic_ops must be a list of basic ops, got {basic_ops!r}")
        ops = tuple(basic_ops)
        for op in ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"[{name}] basic_ops must hold BasicOperation only, got {type(op).__name__}"
                )
        if not ops:
            raise ValueError(f"[{name}] basic_ops must not be empty, got {basic_ops!r}")
        # A tuple, so that nn.Module does not register them a second time.
        self._basic_ops = ops

    @classmethod
    def _method_families(cls) -> tuple[methods.Family, ...]:
        return ("fuser",)

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def basic_ops(self) -> list[BasicOperation]:
        return list(self._basic_ops)

    @property
    def supports_forward(self) -> bool:
        """Whether the class defines a forward."""
        return self._python_forward is not None

    @property
    def supports_backward(self) -> bool:
        """Whether the class defines `fuser_backward`."""
        return self._python_backward is not None

    def extra_repr(self) -> str:
        return ", ".join(type(op).__name__ for op in self._basic_ops)
