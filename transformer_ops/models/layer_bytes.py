"""The bytes that each layer of a model saves for backward, with its own statements and with ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.sharding import is_gathered, sharding_restored, storages
from ..reports.step_bytes import restored
from ..reports.svg import Canvas, Pictured
from ..reports.tables import html_table, size_text
from .fused_class import FusedModule

__all__ = ["LayerBytes", "LayerRow", "bytes_by_layer"]

_BAR = 24  # characters of the longest bar in a terminal
_WIDTH, _ROW, _NAME, _MARGIN = 760, 22, 220, 10  # of a picture, in pixels
_BEFORE, _AFTER = "#8c8c8c", "#1f5f99"


class LayerRow(NamedTuple):
    """One layer.

    Attributes:
        path: of the layer in the model; "" for the model itself.
        before: the bytes that its own statements save for backward.
        after: the bytes that are saved with ops in their place.
    """

    path: str
    before: int
    after: int


class LayerBytes(Pictured):
    """The bytes saved for backward by each layer: as text, as a table in a notebook, and as a
    picture. A layer is an item of an `nn.ModuleList` or `nn.Sequential` whose items have one class,
    with all that it calls, or a module outside of such lists."""

    def __init__(self, rows: list[LayerRow]) -> None:
        self.rows = rows

    @property
    def before(self) -> int:
        """The bytes of all layers without ops."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """The bytes of all layers with ops."""
        return sum(row.after for row in self.rows)

    def _most(self) -> int:
        """Returns the bytes of the longest bar."""
        return max((max(row.before, row.after) for row in self.rows), default=0) or 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"before": ..., "after": ..., "layers": [...]}`, each layer as a dict."""
        layers = [row._asdict() for row in self.rows]
        return {"before": self.before, "after": self.after, "layers": layers}

    def __str__(self) -> str:
        most = self._most()
        lines = [
            f"{size_text(self.before)} saved for backward without ops, {size_text(self.after)} with"
        ]
        for row in self.rows:
            bar = "#" * round(_BAR * row.after / most)
            rest = "." * (round(_BAR * row.before / most) - len(bar))
            sizes = f"{size_text(row.before):>10} {size_text(row.after):>10}"
            lines.append(f"  {_short(row.path, 28):28} {sizes}  {bar}{rest}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [*self.rows, LayerRow("all", self.before, self.after)]
        cells = [(_name(row.path), size_text(row.before), size_text(row.after)) for row in rows]
        return html_table(("layer", "without ops", "with ops"), cells)

    def svg(self) -> str:
        """A standalone SVG picture."""
        most = self._most()
        scale = (_WIDTH - _NAME - 2 * _MARGIN - 90) / most
        before, after = size_text(self.before), size_text(self.after)
        title = "saved for backward"
        canvas = Canvas()
        canvas.text(_MARGIN, _MARGIN + 12, title, bold=True, anchor="start")
        totals = ((_BEFORE, f"{before} without ops"), (_AFTER, f"{after} with ops"))
        for x, (color, total) in zip((_NAME, _NAME + 180), totals, strict=True):
            canvas.box(x, _MARGIN + 3, 10, 10, fill=color, stroke=color, radius=2)
            canvas.text(x + 16, _MARGIN + 12, total, anchor="start")
        for number, row in enumerate(self.rows, start=1):
            y = _MARGIN + number * _ROW
            canvas.text(_NAME - 8, y + 15, _short(row.path, 32), anchor="end")
            for top, count, color in ((4, row.before, _BEFORE), (11, row.after, _AFTER)):
                width = scale * count
                canvas.box(_NAME, y + top, width, 6, fill=color, stroke=color, radius=0)
            end = _NAME + scale * max(row.before, row.after) + 6
            canvas.text(end, y + 15, size_text(row.after), anchor="start")
        return canvas.document(title, margin=_MARGIN)


def _name(path: str) -> str:
    return path or "(the model)"


def _short(path: str, length: int) -> str:
    name = _name(path)
    return name if len(name) <= length else f"...{name[3 - length :]}"


def bytes_by_layer(model: nn.Module, args: Any, kwargs: Any) -> dict[str, int]:
    """Runs the model, and counts the storages that it saves for backward: each once, for the layer
    that saves it first, without parameters."""
    own: set[int] = set()
    gathers = is_gathered(model)
    sizes = {_layer_of(model, path): 0 for path, _ in model.named_modules()}
    seen: set[int] = set()
    kept: list[Tensor] = []  # so that no address is used twice
    path = [""]

    def pack(tensor: Tensor) -> Tensor:
        nonlocal own
        if gathers or not own:  # what FSDP2 has gathered at the moment is among the parameters
            own = _addresses(model)
        found = storages(tensor)
        new = found.keys() - own - seen
        if new:
            seen.update(new)
            kept.append(tensor.detach())
            sizes[_layer_of(model, path[-1])] += sum(found[address] for address in new)
        return tensor.detach()  # an output would keep its own graph alive

    with (
        sharding_restored(model),
        restored(model, list(model.parameters()), []),
        _calls(model, path),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = model(*args, **kwargs)
    del output
    return sizes


def _addresses(model: nn.Module) -> set[int]:
    return {address for tensor in model.parameters() for address in storages(tensor)}


@contextmanager
def _calls(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keeps the path of the module that runs. Hooks would have layers run their own statements."""
    names = {id(module): name for name, module in model.named_modules()}
    call = nn.Module.__call__

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path.append(names.get(id(module), path[-1]))
        try:
            return call(module, *args, **kwargs)
        finally:
            path.pop()

    noting._tops_noted = call  # type: ignore[attr-defined]
    nn.Module.__call__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def _layer_of(model: nn.Module, path: str) -> str:
    """The layer that the path lies in, else the path itself."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if parts[count - 1].isdigit():
            parent = model.get_submodule(".".join(parts[: count - 1]))
            if _has_layers(parent):
                return ".".join(parts[:count])
    return path


def _has_layers(module: nn.Module) -> bool:
    """Whether it is a list of modules of one class. A feed-forward that is an `nn.Sequential` of
    products and an activation is none."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    kinds = {item._tops_base if isinstance(item, FusedModule) else type(item) for item in module}
    return len(module) > 1 and len(kinds) == 1
