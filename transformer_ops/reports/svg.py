"""A little SVG writer: shapes and text with an estimate of its width, everything escaped."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import ClassVar

__all__ = ["Canvas", "Pictured", "text_width"]

FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

# The characters that XML cannot contain even when escaped, and lone surrogates.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width in pixels, estimated generously because the viewer's font is not known."""
    return len(text) * size * (0.66 if bold else 0.58)


class Pictured:
    """A report that is printed as text and saved as a picture."""

    # The name that an error gives.
    _made_by: ClassVar[str] = "fuse"

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """A standalone SVG picture, without scripts, external fonts or external files."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file.

        Raises:
            ValueError: the path does not end in ".svg".
            OSError: the file cannot be written.
        """
        name = os.fspath(path)
        if not name.lower().endswith(".svg"):
            raise ValueError(f"[{self._made_by}] path must end in .svg, got {name!r}")
        Path(name).write_text(self.svg(), encoding="utf-8")


class Canvas:
    """Elements in drawing order; `width` and `height` grow with them."""

    def __init__(self) -> None:
        self._elements: list[str] = []
        self._heads: dict[str, str] = {}
        self.width = 0.0
        self.height = 0.0

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str,
        dashed: bool = False,
        radius: float = 6,
    ) -> None:
        """A rectangle with round corners."""
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{radius:g}" fill="{fill}" stroke="{stroke}"{_dash(dashed)}/>'
        )
        self._grow(x + width, y + height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        color: str = "#0f172a",
        bold: bool = False,
        anchor: str = "middle",
    ) -> None:
        """A line of text; `y` is its baseline."""
        clean = escape(_ILLEGAL.sub("\ufffd", text))
        weight = ' font-weight="600"' if bold else ""
        self._elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{clean}</text>'
        )
        if anchor == "start":
            self._grow(x + text_width(text, size, bold=bold), y)

    def path(self, data: str, *, stroke: str, arrow: bool = False) -> None:
        """A line; `arrow` puts a head at its end."""
        head = ""
        if arrow:
            name = self._heads.setdefault(stroke, f"head{len(self._heads)}")
            head = f' marker-end="url(#{name})"'
        self._elements.append(
            f'<path d="{data}" fill="none" stroke="{stroke}" stroke-width="1.3"{head}/>'
        )

    def arrow_head(self, x: float, y: float, *, left: bool, color: str) -> None:
        """A small triangle centred at a point."""
        tip, back = (x - 4, x + 3) if left else (x + 4, x - 3)
        self._elements.append(
            f'<path d="M{back:.1f} {y - 4:.1f} L{tip:.1f} {y:.1f} L{back:.1f} {y + 4:.1f} Z" '
            f'fill="{color}"/>'
        )

    def document(self, title: str, margin: float = 20) -> str:
        """The picture as a standalone file."""
        width, height = round(self.width + margin), round(self.height + margin)
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{color}"/></marker>'
            for color, name in self._heads.items()
        )
        body = "\n".join(self._elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(title)}</title>\n"
            f"<defs>{heads}</defs>\n"
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )

    def _grow(self, right: float, bottom: float) -> None:
        self.width = max(self.width, right)
        self.height = max(self.height, bottom)


def _dash(dashed: bool) -> str:
    return ' stroke-dasharray="5 3"' if dashed else ""
