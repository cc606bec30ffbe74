"""What `fuse` did to a model, and what runs now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..reports.progress import progress
from ..reports.step_bytes import step_bytes
from ..reports.svg import Canvas, Pictured, text_width
from ..reports.tables import html_table, text_table, unbroken
from .fused_class import FusedModule
from .layer_bytes import LayerBytes, LayerRow, bytes_by_layer
from .step_comparison import StepComparison
from .unfuse import unfused

__all__ = ["FuseReport", "FuseRow"]

_NOTHING = "nothing to fuse: no rule matches a module"
_ROW, _MARGIN = 22, 10  # of the picture, in pixels
_FUSED, _LEFT = "#1f5f99", "#8c8c8c"


class FuseRow(NamedTuple):
    """One part of a module's `forward`.

    Attributes:
        path: of the module in the model.
        kind: its class.
        rule: the name of the rule.
        reason: why no ops replace it at the moment; empty if ops do.
    """

    path: str
    kind: str
    rule: str
    reason: str


class FuseReport(Pictured):
    """What was fused in a model, and what was not and why: as text, as a table in a notebook, and
    as a picture. It looks at the model whenever it is read, so a hook that is registered later
    shows."""

    def __init__(self, model: nn.Module, skipped: list[FuseRow]) -> None:
        self._model, self._skipped = model, skipped

    @property
    def rows(self) -> list[FuseRow]:
        """One row for each part that a rule matches. Branches of a `forward` that the module's
        attributes disable at the moment are omitted. If ops replace a whole layer with attention,
        its inner parts have no rows of their own: they run only in calls that those ops cannot
        compute."""
        found = list(self._skipped)
        inside: set[int] = set()  # modules that an op with attention stands for
        for path, module in self._model.named_modules():
            if not isinstance(module, FusedModule) or id(module) in inside:
                continue
            kind = module._tops_base.__name__
            rows = [
                (site, region, region.why_not(module))
                for site, region in zip(module._tops_sites, module._regions(), strict=True)
                if region.may_run(module)
            ]
            outer = [(s, r) for s, r, reason in rows if s.arguments is not None and not reason]
            for _, region in outer:
                inside.update(
                    id(inner) for part in region.parts(module) for inner in part.modules()
                )
            found += [
                FuseRow(path, kind, region.rule.name, reason)
                for site, region, reason in rows
                if not any(other.contains(site) for other, _ in outer)
            ]
        return found

    @property
    def fused(self) -> list[FuseRow]:
        """The rows of parts that ops replace."""
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
        """Runs the model twice on these arguments, and returns how many bytes forward saves for
        backward without and with the ops: storages of saved tensors, each counted once, without
        parameters."""
        before, after = self._bytes_by_layer(args, kwargs)
        return sum(before.values()), sum(after.values())

    def layers(self, *args: Any, **kwargs: Any) -> LayerBytes:
        """Runs the model twice on these arguments, and returns the bytes that each layer saves for
        backward, without and with the ops. Their sums are those of `saved_bytes`."""
        before, after = self._bytes_by_layer(args, kwargs)
        rows = [LayerRow(path, count, after[path]) for path, count in before.items()]
        return LayerBytes([row for row in rows if row.before or row.after])

    def _bytes_by_layer(self, args: Any, kwargs: Any) -> tuple[dict[str, int], dict[str, int]]:
        with progress("saved bytes", 2) as advance:
            with unfused(self._model):
                before = bytes_by_layer(self._model, args, kwargs)
            advance()
            return before, bytes_by_layer(self._model, args, kwargs)

    def step(
        self,
        *args: Any,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        **kwargs: Any,
    ) -> StepComparison:
        """Runs training steps of the model on these arguments, and returns the exact bytes that a
        step holds at its peak, without and with the ops. `transformer_ops.memory.step_bytes`
        describes the arguments, what is counted, and what is afterwards as before."""
        model, options = self._model, {"optimizer": optimizer, "loss": loss, **kwargs}
        with unfused(model):
            before = step_bytes(model, *args, **options)
        return StepComparison(before, step_bytes(model, *args, **options))

    def _lines(self) -> Iterator[tuple[str, str, str, int]]:
        """(class, rule, reason, how many)."""
        counts = Counter((row.kind, row.rule, row.reason) for row in self.rows)
        for (kind, rule, reason), count in counts.items():
            yield kind, rule, reason, count

    def _head(self) -> str:
        return f"{len(self.fused)} fused, {len(self.skipped)} left as they are"

    def __str__(self) -> str:
        rows = [
            (unbroken(f"{count:3d} x {kind}"), rule, reason or "fused")
            for kind, rule, reason, count in self._lines()
        ]
        return "\n".join([self._head(), *text_table(rows, indent="  ")]) if rows else _NOTHING

    def _repr_html_(self) -> str:
        cells = [
            (str(count), kind, rule, reason or "fused")
            for kind, rule, reason, count in self._lines()
        ]
        return html_table(("modules", "class", "rule", "state"), cells) if cells else _NOTHING

    def svg(self) -> str:
        """A standalone SVG picture."""
        rows = [
            (_LEFT if reason else _FUSED, (f"{count} x {kind}", rule, reason or "fused"))
            for kind, rule, reason, count in self._lines()
        ]
        canvas, title = Canvas(), self._head() if rows else _NOTHING
        canvas.text(_MARGIN, _MARGIN + 12, title, bold=True, anchor="start")
        columns = zip(*(cells for _, cells in rows), strict=True)
        widths = [max(text_width(cell, 12) for cell in column) + 16 for column in columns]
        for number, (color, cells) in enumerate(rows, start=1):
            y = _MARGIN + number * _ROW
            canvas.box(_MARGIN, y + 6, 10, 10, fill=color, stroke=color, radius=2)
            x: float = _MARGIN + 20
            for cell, width in zip(cells, widths, strict=True):
                canvas.text(x, y + 15, cell, anchor="start")
                x += width
        return canvas.document(title, margin=_MARGIN)
