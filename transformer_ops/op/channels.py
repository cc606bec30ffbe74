"""Named channels, which connect extra outputs of an op to extra inputs of later ops of a
Sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

OpT = TypeVar("OpT", bound="ChannelMixin")


class PrivateChannel(str):
    """A channel that is different from all others, whatever its name. It may be fed repeatedly: a
    consumer reads the last value before it."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class ChannelMixin:
    """Binds extra inputs and outputs of an op to channel names."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    # The group that captures the op sets this: from then on the routing is part of plans.
    _channels_captured: bool = False
    _bound_inputs: tuple[str | None, ...] | None = None
    _bound_outputs: tuple[tuple[str | None, bool], ...] | None = None
    # The extra outputs that the op does not return unless a channel is set.
    _unreturned: tuple[int, ...] = ()

    @property
    def _input_channels(self) -> tuple[str | None, ...]:
        """For each extra input, the channel that it reads; None if the caller passes it."""
        if self._bound_inputs is None:
            return (None,) * self.num_extra_inputs
        return self._bound_inputs

    @property
    def _output_channels(self) -> tuple[tuple[str | None, bool], ...]:
        """For each extra output, the channel that it feeds, and whether the caller gets it."""
        if self._bound_outputs is None:
            return tuple((None, i not in self._unreturned) for i in range(self.num_extra_outputs))
        return self._bound_outputs

    def set_extra_input_channel(self: OpT, index: int, name: str | None) -> OpT:
        """Reads extra input `index` from channel `name`. None: the caller passes it again.

        Returns the op itself. Raises TypeError if the index is no int or the name is no str,
        ValueError if the name is empty, IndexError if the index is outside `[0, num_extra_inputs)`,
        and RuntimeError once a group has captured the op.
        """
        index = self._check_channel("extra input", index, self.num_extra_inputs, name)
        channels = list(self._input_channels)
        channels[index] = name
        self._bound_inputs = tuple(channels)
        return self

    def set_extra_output_channel(
        self: OpT, index: int, name: str | None, output_to_caller: bool = True
    ) -> OpT:
        """Feeds extra output `index` into channel `name`. None: into no channel.

        With `output_to_caller=False` the output is not returned to the caller. Returns the op
        itself. Raises the errors of `set_extra_input_channel`, and TypeError if the flag is no
        bool.
        """
        index = self._check_channel("extra output", index, self.num_extra_outputs, name)
        if not isinstance(output_to_caller, bool):
            raise TypeError(
                f"[{type(self).__name__}] output_to_caller must be a bool, got {output_to_caller!r}"
            )
        channels = list(self._output_channels)
        channels[index] = (name, output_to_caller)
        self._bound_outputs = tuple(channels)
        return self

    def _check_channel(self, what: str, index: object, count: int, name: object) -> int:
        op = type(self).__name__
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"[{op}] index of an {what} must be an int, got {index!r}")
        if not 0 <= index < count:
            raise IndexError(f"[{op}] index of an {what} must be in [0, {count}), got {index}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"[{op}] channel name must be a str or None, got {name!r}")
        if name == "":
            raise ValueError(f"[{op}] channel name must not be empty, got {name!r}")
        if self._channels_captured:
            raise RuntimeError(
                f"[{op}] channels must be set before a group captures the op, "
                f"got {name!r} for {what} {index} afterwards"
            )
        return index


class ChannelOp(Protocol):
    """The attributes of an op that the resolver reads."""

    @property
    def _input_channels(self) -> tuple[str | None, ...]: ...

    @property
    def _output_channels(self) -> tuple[tuple[str | None, bool], ...]: ...


class External(NamedTuple):
    """An extra input that the caller passes, by its position in the caller's order."""

    place: int


class Routed(NamedTuple):
    """An extra input that an earlier op of the list computes."""

    position: int
    output: int


class Routing(NamedTuple):
    """The source and the destination of every extra tensor of a list of ops."""

    inputs: tuple[tuple[External | Routed, ...], ...]
    """For each op, for each of its extra inputs, the source."""

    visible_outputs: tuple[tuple[int, int], ...]
    """(op position, output index) of the extra outputs that the caller gets, in order."""

    num_external_inputs: int
    """Extra inputs that the caller must pass."""


def resolve_channels(ops: Sequence[ChannelOp], names: Sequence[object] | None = None) -> Routing:
    """Connects the channels of the basic ops of one Sequential; an op may appear twice. Errors use
    the `names`.

    Raises ValueError if a channel has two producers, or if a consumer has no producer before it.
    """
    if names is None:
        names = [f"op {position} ({type(op).__name__})" for position, op in enumerate(ops)]
    producers = _find_producers(ops, names)
    inputs: list[tuple[External | Routed, ...]] = []
    external = 0
    for position, op in enumerate(ops):
        sources: list[External | Routed] = []
        for index, name in enumerate(op._input_channels):
            if name is None:
                sources.append(External(external))
                external += 1
            else:
                sources.append(_find_source(names, producers, position, index, name))
        inputs.append(tuple(sources))
    visible = tuple(
        (position, index)
        for position, op in enumerate(ops)
        for index, (_, to_caller) in enumerate(op._output_channels)
        if to_caller
    )
    return Routing(tuple(inputs), visible, external)


def _find_producers(ops: Sequence[ChannelOp], names: Sequence[object]) -> dict[str, list[Routed]]:
    producers: dict[str, list[Routed]] = {}
    for position, op in enumerate(ops):
        for index, (name, _) in enumerate(op._output_channels):
            if name is None:
                continue
            found = producers.setdefault(name, [])
            if found and not isinstance(name, PrivateChannel):
                raise ValueError(
                    f"[Sequential] channel {name!r} must have one producer, got "
                    f"{names[found[0].position]} and {names[position]}"
                )
            found.append(Routed(position, index))
    return producers


def _find_source(
    names: Sequence[object],
    producers: dict[str, list[Routed]],
    position: int,
    index: int,
    name: str,
) -> Routed:
    every = producers.get(name, [])
    before = [source for source in every if source.position < position]
    if not before:
        got = names[every[0].position] if every else "none"
        raise ValueError(
            f"[Sequential] channel {name!r} must have a producer before extra input {index} of "
            f"{names[position]}, got {got}"
        )
    return before[-1]
