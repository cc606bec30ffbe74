"""The base class of single ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from .. import _C
from ..quantization.quantizers import Quantizer
from .channels import ChannelMixin
from .checks import check_bool, check_float, check_optional_float
from .context import OperationContext
from .fusible import Check, FusibleOperation, run_alone_by
from .methods import unpacked

__all__ = [
    "Attribute",
    "BasicOperation",
    "Check",
    "FusibleOperation",
    "quantizers_by",
    "run_alone_by",
]

Attribute = bool | int | float | str | list[int] | list[float]

# The check by the type of an attribute in the schema, if the class has no check of its own.
_TYPE_CHECKS: dict[str, Check] = {
    "float": check_float,
    "float?": check_optional_float,
    "bool": check_bool,
}

# (op, mode, i) -> the quantizer of a tensor.
_quantizer_of: Callable[[Any, str, int], Quantizer | None]


def quantizers_by(quantizer_of: Callable[[Any, str, int], Quantizer | None]) -> None:
    """The layer of recipes calls this once. It sets how the quantizers of an op are found."""
    global _quantizer_of
    _quantizer_of = quantizer_of


class BasicOperation(ChannelMixin, FusibleOperation):
    """One op, which is native or defined by the user in Python.

    `class Softcap(BasicOperation, kind="Softcap")` is native: it gets parameters, extra tensors and
    attributes, each under its own name, from the C++ declaration of that kind, which must be
    loaded. Raises RuntimeError if there is none.

    A Python op implements `op_backward` and `op_forward`, or the pair `op_forward_compute` and
    `op_forward_save_ctx` instead of the latter. With extra tensors (`num_extra_inputs`,
    `num_extra_outputs`) it implements the `fuser_*` methods of `FusibleOperation` instead. Half a
    pair, or a pair and the single method in one class body, raises TypeError when the class is
    defined. Otherwise the most derived definition runs.
    """

    _is_contract: ClassVar[bool] = True
    _kind: ClassVar[str | None] = None
    # The kinds of declarations that instances may have.
    _kinds: ClassVar[tuple[str, ...]] = ()
    _parameter_names: ClassVar[tuple[str, ...]] = ()
    # For parameters that are lists of tensors: the attribute with the number of tensors, and the
    # one that says whether a single tensor replaces the list ("": none does).
    _lists: ClassVar[Mapping[str, tuple[str, str]]] = {}
    _attribute_names: ClassVar[tuple[str, ...]] = ()
    # The attributes that may be None; plans then do not have them.
    _optional_attributes: ClassVar[frozenset[str]] = frozenset()
    # The attributes that plans have only if they are True.
    _flag_names: ClassVar[tuple[str, ...]] = ()
    # Whether it multiplies one half of its columns by a function of the other half.
    _is_gated: ClassVar[bool] = False
    # torch.nn's argument; in_place.py says where it is allowed.
    inplace: bool = False

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def __init_subclass__(cls, *, kind: str | None = None, **kwargs: Any) -> None:
        if kind is not None:
            cls._take_declaration(kind)
        super().__init_subclass__(**kwargs)

    @classmethod
    def _take_declaration(cls, kind: str) -> None:
        row = _C.declaration(kind)
        cls._kind = kind
        cls._kinds = (kind,)
        cls._parameter_names = tuple(row["parameters"])
        cls._lists = row["lists"]
        cls._attribute_names = tuple(row["attributes"])
        cls._flag_names = tuple(row["flags"])
        cls.num_extra_inputs = len(row["extra_inputs"])
        cls.num_extra_outputs = len(row["extra_outputs"])
        types = row["attribute_types"].items()
        cls._optional_attributes = frozenset(n for n, type_ in types if type_.endswith("?"))
        by_type = {name: _TYPE_CHECKS[type_] for name, type_ in types if type_ in _TYPE_CHECKS}
        flags = dict.fromkeys(cls._flag_names, check_bool)
        cls._checks = {**by_type, **flags, **cls._inherited_checks()}

    def _plan_note(self) -> str:
        """What `explain()` says of this op besides its steps."""
        return ""

    def get_quantizer(self, mode: str, i: int) -> Quantizer | None:
        """The quantizer of a tensor of this op, under the recipe of the surrounding region, or else
        of the last region that this thread entered. i = 0 is the input in mode "forward", and the
        output gradient in mode "backward"; i = 1 is the weight. For a grouped product, i = 2 g and
        2 g + 1 are input and weight of group g, and i = g is its output gradient. Returns None if
        the recipe does not quantize the tensor, or if there was no recipe.

        Raises ValueError for another mode.
        """
        return _quantizer_of(self, mode, i)

    def _declaration(self) -> dict[str, Any]:
        """The declaration of a native op."""
        assert self._kind is not None
        return _C.declaration(self._kind)

    def _attributes(self) -> dict[str, Attribute]:
        """The constructor arguments that the planner of a native op needs."""
        found = {name: getattr(self, name) for name in self._attribute_names}
        for name in self._optional_attributes:
            if found[name] is None:
                del found[name]
        found |= {name: True for name in self._flag_names if getattr(self, name, False)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    def extra_repr(self) -> str:
        """The attributes of a native op, and its flags that are set."""
        names = (*self._attribute_names, *self._flag_names)
        found = ((name, getattr(self, name, None)) for name in names)
        return ", ".join(f"{name}={v}" for name, v in found if v is not None and v is not False)

    @property
    def owner(self) -> nn.Module:
        """The module that the user made: the `Linear` of its product and of its bias, otherwise the
        op itself. Attributes that the user sets on a `Linear` are there."""
        return self._parameter_owner

    @property
    def _parameter_owner(self) -> nn.Module:
        """The module that owns the parameters; it is looked up at every call."""
        return self

    def _names_in(self, parameter: str) -> tuple[str, ...]:
        """The names of the tensors of a parameter: its own, or those of its list."""
        if parameter not in self._lists:
            return (parameter,)
        count, single = self._lists[parameter]
        if single and getattr(self, single):
            return (parameter,)
        return tuple(f"{parameter}{i}" for i in range(getattr(self, count)))

    def _tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors of all parameters that a native op declares."""
        if not self._lists:
            return self._parameter_names
        return tuple(n for parameter in self._parameter_names for n in self._names_in(parameter))

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        """The module and the name of each of these tensors."""
        owner = self._parameter_owner
        return [(owner, name) for name in self._tensor_names()]

    def _reads(self, parameter: str) -> bool:
        return parameter in self._tensor_names()

    def _parameter_tensors(self) -> list[Any]:
        """The current tensors of the parameters, in the order in which backward returns gradients.

        For a native op these are the declared ones; optional ones may be None. A parametrized
        parameter is the tensor that its parametrization computes.
        """
        if self._kind is not None and self._python_backward is None:
            return [getattr(owner, name) for owner, name in self._tensor_places()]
        owner = self._parameter_owner
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
        """Single style: returns the output, and saves what backward needs in `ctx`."""
        raise NotImplementedError(f"[{type(self).__name__}] op_forward must be defined")

    def op_forward_compute(
        self,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Split style, first half, pure: returns (output, tensors to save)."""
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
        """Split style, second half: saves what compute returned in `ctx`."""
        raise NotImplementedError(f"[{type(self).__name__}] op_forward_save_ctx must be defined")

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """Returns (gradient of the input, gradients of the parameters in the order of
        `parameters()`)."""
        raise NotImplementedError(f"[{type(self).__name__}] op_backward must be defined")

    def _extra_input_names(self) -> list[str]:
        declared = [] if self._kind is None else self._declaration()["extra_inputs"]
        # The class gives the number of extra inputs; planning compares it with the declaration.
        others = [f"extra input {k}" for k in range(len(declared), self.num_extra_inputs)]
        return [*declared, *others][: self.num_extra_inputs]

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
