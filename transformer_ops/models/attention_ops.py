"""Ops that borrow the parameters of an attention module, and what they ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modules.views import BorrowedPackedLinear, BorrowedRMSNorm
from ..op.base import FusibleOperation
from ..op.borrowed import Borrowed
from ..ops.add_extra_input import AddExtraInput
from ..ops.attention import Attention, QKNorm
from ..ops.bias import Bias
from ..ops.make_extra_output import MakeExtraOutput
from ..ops.rope import RoPE
from .attention_rest import Rest
from .facts import Facts, Watcher

__all__ = [
    "AddArgument",
    "AttentionCall",
    "AttentionChoice",
    "AttentionInputs",
    "BorrowedAttention",
    "BorrowedQKNorm",
    "BorrowedRoPE",
    "JoinedBias",
    "NoKeyBias",
    "ReorderedLinear",
    "attention_in",
    "chosen",
]

# What of a call decides which ops run: whether there is a mask, whether attention is causal, how
# many numbers of each head the tables rotate, if there are tables, whether a cache takes keys and
# values, and whether a row that the mask lets read nothing is NaN. Dynamo traces it.
AttentionChoice = tuple[bool, bool, int | None, bool, bool]


class AttentionInputs(NamedTuple):
    """What a call gives ops: which ones, their extra inputs, and the cache that they fill."""

    choice: AttentionChoice
    extra_inputs: tuple[Tensor, ...]
    cache: tuple[Any, int] | None  # and the number of the layer in it


class AttentionCall:
    """What is known of an attention module: its ops, and what a call of it gives them."""

    gives_pair = True  # not the result alone
    rest: Rest | None = None  # statements that run behind its ops
    sinks: str = ""  # the parameter with their scores
    key_factor = 1.0  # of keys that a cache takes; `scale` has it for scores

    @property
    def by_head(self) -> bool:
        """Whether query, key and value of each head are next to each other."""
        return False

    def head_dim(self, module: Any) -> int:
        """The numbers of a head."""
        raise NotImplementedError

    def scale(self, module: Any) -> float:
        """The factor of scores."""
        raise NotImplementedError

    def p(self, module: Any) -> float:
        """The probability that a weight is dropped."""
        raise NotImplementedError

    def rotary_dims(self, module: Any) -> list[int | None]:
        """How many numbers of a head calls usually rotate; None for calls without tables."""
        raise NotImplementedError

    def widths(self, module: Any) -> tuple[int, int]:
        """The numbers of a row of queries, and of keys."""
        raise NotImplementedError

    def ops(self, module: Any) -> list[FusibleOperation]:
        """All that the module computes. FuseSkip if ops do not."""
        raise NotImplementedError

    def has_plain_softmax(self, module: Any) -> bool:
        """Whether the module computes scores and their softmax itself, instead of torch's
        attention: a mask is a sum, and a row that it lets read nothing is NaN."""
        raise NotImplementedError

    def masked(
        self,
        module: Any,
        mask: Tensor,
        tables: tuple[Tensor, ...],
        rotary_dim: int | None,
        cache: tuple[Any, int] | None,
    ) -> AttentionInputs | None:
        """What the ops take for a call with a mask; None if they do not compute it."""
        is_plain = self.has_plain_softmax(module)
        if mask.requires_grad or (is_plain and not mask.is_floating_point()):
            return None
        choice = (True, False, rotary_dim, cache is not None, is_plain)
        return AttentionInputs(choice, (*tables, mask), cache)

    # The name of the argument that ops take, and those of the others.
    _first: str = ""
    _others: tuple[str, ...] = ()

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call behind the first one, by name; None if that one is, too."""
        if self._first in kwargs:
            return None
        named = dict(zip(self._others, args, strict=False)) if args else {}
        return {**named, **kwargs}

    def inputs(
        self, module: Any, input: Tensor, given: Mapping[str, Any], gives_weights: bool
    ) -> AttentionInputs | None:
        """What the ops take for a call of the module with these arguments, where they take an input
        with as many rows; None if its statements have to run."""
        raise NotImplementedError

    def functions(self) -> list[Any]:
        """The functions that a call of the module reaches, and its source does not name."""
        return []

    def finish(self, module: Any, input: Tensor, output: Tensor) -> Any:
        """What the module returns where its ops gave this; both results if it returns a pair."""
        if self.rest is None:
            return (output, None) if self.gives_pair else output
        return self.rest.run(module, input, output.unflatten(-1, (-1, self.head_dim(module))), None)

    def fill(self, module: Any, cache: Any, layer: int, rows: Tensor) -> None:
        """Gives keys and values in rows of queries, keys and values to an empty cache."""
        query, key = self.widths(module)
        head_dim = self.head_dim(module)
        if self.by_head:
            heads = rows.unflatten(-1, (-1, 3 * head_dim)).transpose(1, 2)
            _, keys, values = heads.chunk(3, dim=-1)
        else:
            keys, values = (
                rows[..., first : first + key].unflatten(-1, (-1, head_dim)).transpose(1, 2)
                for first in (query, query + key)
            )
        keys = keys if self.key_factor == 1 else keys * self.key_factor
        cache.update(keys, values, layer)


class BorrowedAttention(Watcher, Borrowed, Attention):
    """The attention of a module, between its products."""

    _is_called = False
    call: AttentionCall

    def __init__(self, owner: nn.Module, call: AttentionCall) -> None:
        super().__init__(owner)
        self.__dict__["call"] = call
        self.choose((False, False, None, False, False))

    @property
    def module(self) -> nn.Module:
        """The attention module."""
        return self._parameter_owner

    def add_facts(self, facts: Facts) -> None:
        for function in self.call.functions():
            facts.add_function(function)

    def choices(self) -> list[AttentionChoice]:
        """What calls usually choose."""
        kinds = (
            (False, False, False),
            (False, True, False),
            (True, False, self.call.has_plain_softmax(self.module)),
        )
        rotary_dims = self.call.rotary_dims(self.module)
        return [
            (mask, causal, n, has, nan_rows)
            for mask, causal, nan_rows in kinds
            for n in rotary_dims
            for has in (False, True)
        ]

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return (self.call.sinks,) if self.call.sinks else ()

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        name = self.call.sinks
        return [(self._parameter_owner, name) if name else (self, "sinks")]

    @property
    def sinks(self) -> Tensor | None:  # type: ignore[override]
        return getattr(self._parameter_owner, self.call.sinks) if self.call.sinks else None

    def choose(self, choice: AttentionChoice) -> None:
        """Takes what a call gives. No group has the op yet."""
        self.__dict__["_choice"] = choice
        self.__dict__["num_extra_inputs"] = int(choice[0])

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.call.head_dim(self._parameter_owner)

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return self.call.widths(self._parameter_owner)[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:  # type: ignore[override]
        return self.call.widths(self._parameter_owner)[1] // self.head_dim

    @property
    def scale(self) -> float | None:  # type: ignore[override]
        return self.call.scale(self._parameter_owner)

    @property
    def p(self) -> float:  # type: ignore[override]
        return self.call.p(self._parameter_owner)

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.call.by_head

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return bool(self.__dict__["_choice"][1])

    @property
    def nan_rows(self) -> bool:
        return bool(self.__dict__["_choice"][4])


class NoKeyBias(BorrowedPackedLinear):
    """Products of which that for keys has no bias."""

    def _tensors_in(self, parameter: str) -> list[Tensor | None]:
        return [
            self.key_bias if found is None else found for found in super()._tensors_in(parameter)
        ]

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [
            (self, "key_bias") if getattr(owner, name) is None else (owner, name)
            for owner, name in super()._tensor_places()
        ]

    @property
    def key_bias(self) -> Tensor:
        weight = self._weights()[1]
        return weight.new_zeros(weight.shape[0])


class AddArgument(AddExtraInput):
    """A sum with an argument of the attention module."""


class ReorderedLinear(BorrowedPackedLinear):
    """A product whose rows are in another order: parts of its weight, each from a first row on, and
    with so many rows."""

    _decoded = ()  # type: ignore[assignment]

    def __init__(self, owner: nn.Linear, parts: Sequence[tuple[int, int]]) -> None:
        super().__init__(owner)
        own = self.__dict__
        in_order = sorted(parts)
        own["_sizes"], own["_order"] = [n for _, n in in_order], [*map(in_order.index, parts)]
        own["_made"] = {}

    def _tensors_in(self, parameter: str) -> list[Tensor | None]:
        return [getattr(self, f"{parameter}{i}") for i in range(len(self.__dict__["_order"]))]

    def _weights(self) -> list[Tensor]:
        return [getattr(self, f"weight{i}") for i in range(len(self.__dict__["_order"]))]

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [(self, name) for name in self._tensor_names()]

    def __getattr__(self, name: str) -> Any:
        kind = name.rstrip("0123456789")
        if kind not in ("weight", "bias") or kind == name:
            return super().__getattr__(name)
        number, whole = int(name.removeprefix(kind)), getattr(self._parameter_owner, kind)
        own = self.__dict__
        made = own["_made"].get(kind)
        # One split for all parts: its backward joins their gradients once.
        if whole is not None and (number == 0 or made is None or made[0]._base is not whole):
            made = own["_made"][kind] = whole.split(own["_sizes"])
        return None if whole is None else made[own["_order"][number]]

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        if not self._has_own_forward:
            return FusibleOperation.forward(self, input, *extra_inputs, **kwargs)
        found = self._parameter_owner(input).split(self.__dict__["_sizes"], -1)
        return torch.cat([found[i] for i in self.__dict__["_order"]], -1)


class JoinedBias(Borrowed, Bias):
    """A bias in parts that belong to an attention module."""

    _is_called = False

    def __init__(self, owner: nn.Module, names: Sequence[str]) -> None:
        super().__init__(owner)
        self.__dict__["_parts"] = tuple(names)

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return ()

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        # The gradients of the parts are those of the whole.
        return [(self, "bias")]

    def _all_parts(self) -> list[Tensor]:
        return [getattr(self._parameter_owner, name) for name in self.__dict__["_parts"]]

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return torch.cat(self._all_parts())

    @property
    def size(self) -> int:  # type: ignore[override]
        return sum(map(len, self._all_parts()))


class BorrowedRoPE(RoPE):
    """The rotation of queries and keys, by as many numbers as the tables of a call have."""

    def choose(self, choice: AttentionChoice) -> None:
        self.rotary_dim = choice[2]


class BorrowedQKNorm(Borrowed, QKNorm):
    """The norms of queries and keys."""

    def __init__(
        self,
        query: BorrowedRMSNorm,
        key: BorrowedRMSNorm,
        attention: BorrowedAttention,
        whole: bool,
    ) -> None:
        super().__init__(query._parameter_owner)
        own = self.__dict__
        own["_norms"], own["_attention"], own["_is_whole"] = (query, key), attention, whole
        own["_watched"] = query._watched

    def _owners(self) -> list[nn.Module]:
        return [one._parameter_owner for one in self.__dict__["_norms"]]

    @property
    def _has_weights(self) -> bool:
        return self.__dict__["_norms"][0].weight is not None

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return ("weight",) if self._has_weights else ()

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        if self._has_weights:
            return [(owner, "weight") for owner in self._owners()]
        return [(self, name) for name in self._tensor_names()]

    @property
    def q_weight(self) -> Tensor:  # type: ignore[override]
        return self._weight(0)

    @property
    def k_weight(self) -> Tensor:  # type: ignore[override]
        return self._weight(1)

    def _weight(self, i: int) -> Tensor:
        norm = self.__dict__["_norms"][i]
        if norm.weight is not None:
            return norm.weight
        rows = next(self.__dict__["_attention"].module.parameters())
        return rows.new_ones(norm.normalized_shape)

    @property
    def eps(self) -> float | None:  # type: ignore[override]
        return self.__dict__["_norms"][0].eps

    @property
    def zero_centered_gamma(self) -> bool:  # type: ignore[override]
        return bool(self.__dict__["_norms"][0].zero_centered_gamma)

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        return not self.__dict__["_is_whole"]

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return int(self.__dict__["_attention"].head_dim)

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return int(self.__dict__["_attention"].num_heads)

    @property
    def num_kv_heads(self) -> int:  # type: ignore[override]
        return int(self.__dict__["_attention"].num_kv_heads)


def attention_in(ops: Sequence[nn.Module]) -> BorrowedAttention | None:
    """The attention among ops."""
    return next((op for op in ops if isinstance(op, BorrowedAttention)), None)


def chosen(ops: Sequence[nn.Module], choice: AttentionChoice) -> list[nn.Module]:
    """The ops for calls like this one. For a cache, the rows that attention takes are an output."""
    found: list[nn.Module] = []
    for op in ops:
        if isinstance(op, BorrowedRoPE) and choice[2] is None:
            continue
        if isinstance(op, BorrowedAttention | BorrowedRoPE):
            op.choose(choice)
        if isinstance(op, BorrowedAttention) and choice[3]:
            found.append(MakeExtraOutput())
        found.append(op)
    return found
