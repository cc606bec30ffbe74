"""The bytes that each layer of a model saves for backward, with its own statements and with ops."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..step_bytes import size_text

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


class LayerBytes:
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"before": ..., "after": ..., "layers": [...]}`, each layer as a dict."""
        layers = [row._asdict() for row in self.rows]
        return {"before": self.before, "after": self.after, "layers": layers}

    def __str__(self) -> str:
        most = max((row.before for row in self.rows), default=0) or 1
        lines = [
            f"{size_text(self.before)} saved for backward without ops, {size_text(self.after)} with"
        ]
        for row in self.rows:
            bar = "#" * round(_BAR * row.after / most)
            rest = "." * (round(_BAR * row.before / most) - len(bar))
            sizes = f"{size_text(row.before):>10} {size_text(row.after):>10}"
            lines.append(f"  {_short(row.path, 28):28} {sizes}  {bar}{rest}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "<tr><th>layer</th><th>without ops</th><th>with ops</th></tr>"
        total = LayerRow("all", self.before, self.after)
        body = "".join(
            f"<tr><td>{html.escape(row.path)}</td><td>{size_text(row.before)}</td>"
            f"<td>{size_text(row.after)}</td></tr>"
            for row in (*self.rows, total)
        )
        return f"<table>{head}{body}</table>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture.

        Raises:
            ValueError: the path does not end in ".svg".
        """
        target = Path(path)
        if target.suffix != ".svg":
            raise ValueError(f"[fuse] path of a picture must end in .svg, got {str(path)!r}")
        target.write_text(self._picture(), encoding="utf-8")

    def _picture(self) -> str:
        height = _ROW * (len(self.rows) + 1) + 2 * _MARGIN
        most = max((row.before for row in self.rows), default=0) or 1
        scale = (_WIDTH - _NAME - 2 * _MARGIN - 90) / most
        before, after = size_text(self.before), size_text(self.after)
        title = f"saved for backward: {before} without ops, {after} with"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-weight="bold">{title}</text>',
        ]
        for number, row in enumerate(self.rows, start=1):
            y = _MARGIN + number * _ROW
            end = _NAME + scale * max(row.before, row.after) + 6
            lines += [
                f'<text x="{_NAME - 8}" y="{y + 15}" text-anchor="end">'
                f"{html.escape(_short(row.path, 32))}</text>",
                _bar(y + 4, scale * row.before, 6, _BEFORE),
                _bar(y + 11, scale * row.after, 6, _AFTER),
                f'<text x="{end:.0f}" y="{y + 15}">{size_text(row.after)}</text>',
            ]
        return "\n".join([*lines, "</svg>\n"])


def _bar(y: float, width: float, height: int, color: str) -> str:
    return f'<rect x="{_NAME}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def _short(path: str, length: int) -> str:
    name = path or "(the model)"
    return name if len(name) <= length else f"...{name[3 - length :]}"


def bytes_by_layer(model: nn.Module, args: Any, kwargs: Any) -> dict[str, int]:
    """Runs the model, and counts the storages that it saves for backward: each once, for the layer
    that saves it first, without parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    sizes = {_layer_of(model, path): 0 for path, _ in model.named_modules()}
    seen: set[int] = set()
    kept: list[Tensor] = []  # so that no address is used twice
    path = [""]

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own and address not in seen:
            seen.add(address)
            kept.append(tensor)
            sizes[_layer_of(model, path[-1])] += tensor.untyped_storage().nbytes()
        return tensor

    with (
        _calls(model, path),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = model(*args, **kwargs)
    del output
    return sizes


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
    return len(module) > 1 and len({type(item) for item in module}) == 1
