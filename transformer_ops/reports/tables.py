"""Tables in a terminal of 80 columns and in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

__all__ = [
    "CELL_STYLE",
    "WIDTH",
    "html_row",
    "html_table",
    "size_text",
    "text_table",
    "unbroken",
    "wrapped",
]

WIDTH = 80
_GAP = "  "
_ROOM = 20  # columns that the last cell of a row should have
_UNBROKEN = "\N{NO-BREAK SPACE}"
CELL_STYLE = ' style="text-align:left;vertical-align:top;padding:2px 10px"'


def size_text(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def text_table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Returns the rows as lines of at most `WIDTH` characters. Cells that do not fit are wrapped
    between words, those of the last column first. A line is longer only if its words are.

    Args:
        rows: Each has the same number of cells. `unbroken` marks words that stay together.
        indent: It comes before each line.
    """
    columns = list(zip(*rows, strict=True))
    *widths, last = (max(map(len, cells)) for cells in columns)
    words = list(map(_longest_word, columns))
    room = WIDTH - len(indent) - len(_GAP) * len(widths)
    needed = min(last, max(_ROOM, words[-1]))
    while sum(widths) + needed > room:
        spare = [width - word for width, word in zip(widths, words[:-1], strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    # Wrapped lines may be shorter than their column, and the last column takes what they leave.
    wrapped_columns = [
        [_wrap(cell, width) for cell in cells]
        for cells, width in zip(columns, widths, strict=False)
    ]
    widths = [max(len(line) for cell in cells for line in cell) for cells in wrapped_columns]
    widths.append(max(room - sum(widths), words[-1]))
    wrapped_columns.append([_wrap(cell, widths[-1]) for cell in columns[-1]])
    lines = []
    for cells in zip(*wrapped_columns, strict=True):
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append((indent + _GAP.join(padded)).rstrip().replace(_UNBROKEN, " "))
    return lines


def unbroken(text: str) -> str:
    """Returns the text as a single word, which `text_table` does not wrap."""
    return text.replace(" ", _UNBROKEN)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Returns the text as lines of at most `WIDTH` characters, unless a word is longer. Lines after
    the first one are indented by four more characters."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + 4 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def html_row(tag: str, *cells: str) -> str:
    """Returns a row whose cells are `th` or `td`, with their texts escaped."""
    return (
        "<tr>" + "".join(f"<{tag}{CELL_STYLE}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table whose first row is the head."""
    lines = [html_row("th", *head), *(html_row("td", *row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _wrap(cell: str, width: int) -> list[str]:
    if len(cell) <= width:  # textwrap would drop the spaces that it begins with
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def _longest_word(cells: Iterable[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split(" ")), default=0)
