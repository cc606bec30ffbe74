"""What `fuse` did to a model, and what runs now."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fused_class import FusedModule
from .unfuse import unfused

__all__ = ["FuseReport", "FuseRow"]


class FuseRow(NamedTuple):
    """One part of a module's `forward`.

    Attributes:
        path: of the module in the model.
        kind: its class.
        rule: the name of the rule.
        reason: why ops do not stand for it now; empty if they do.
    """

    path: str
    kind: str
    rule: str
    reason: str


class FuseReport:
    """What was fused in a model, and what was not and why. It looks at the model whenever it is
    read, so a hook that is registered later shows."""

    def __init__(self, model: nn.Module, skipped: list[FuseRow]) -> None:
        self._model, self._skipped = model, skipped

    @property
    def rows(self) -> list[FuseRow]:
        """One for each part that a rule matches, but for those in branches of a `forward` that
        attributes of the module rule out now."""
        found = list(self._skipped)
        for path, module in self._model.named_modules():
            if isinstance(module, FusedModule):
                kind = module._tops_base.__name__
                for region in module._regions():
                    if region.may_run(module):
                        reason = region.why_not(module)
                        found.append(FuseRow(path, kind, region.rule.name, reason))
        return found

    @property
    def fused(self) -> list[FuseRow]:
        """The rows of parts that ops stand for."""
        return [row for row in self.rows if not row.reason]

    @property
    def skipped(self) -> list[FuseRow]:
        """The rows of parts that run as they are."""
        return [row for row in self.rows if row.reason]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"fused": [...], "skipped": [...]}`, each row as a dict."""
        return {
            "fused": [row._asdict() for row in self.fused],
            "skipped": [row._asdict() for row in self.skipped],
        }

    def saved_bytes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Runs the model twice on these arguments, and returns how many bytes forward keeps for
        backward without and with the ops: storages of saved tensors, each counted once, without
        parameters."""
        with unfused(self._model):
            before = _saved_bytes(self._model, args, kwargs)
        return before, _saved_bytes(self._model, args, kwargs)

    def _lines(self) -> Iterator[tuple[str, str, str, int]]:
        """(class, rule, reason, how many)."""
        counts = Counter((row.kind, row.rule, row.reason) for row in self.rows)
        for (kind, rule, reason), count in counts.items():
            yield kind, rule, reason, count

    def __str__(self) -> str:
        lines = list(self._lines())
        if not lines:
            return "nothing to fuse: no rule matches a module"
        head = f"{len(self.fused)} fused, {len(self.skipped)} left as they are"
        rows = [
            f"  {count:3d} x {kind:28s} {rule:24s} {reason or 'fused'}"
            for kind, rule, reason, count in lines
        ]
        return "\n".join([head, *rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = [
            (str(count), kind, rule, reason or "fused")
            for kind, rule, reason, count in self._lines()
        ]
        rows = [("", "class", "rule", ""), *cells]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        return f"<table>{body}</table>"


def _saved_bytes(model: nn.Module, args: Any, kwargs: Any) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **kwargs)
    del output
    return sum(sizes.values())
