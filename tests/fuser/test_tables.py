"""Tables of text: no line is longer than a terminal, and no word is lost."""

from __future__ import annotations

import random

import pytest
from helpers import html_cells

from transformer_ops.reports.tables import WIDTH, html_table, text_table, wrapped


def test_cells_that_fit_are_in_columns() -> None:
    rows = [["a", "bb", "c c"], ["aaa", "", ""], [" a", "b", "c"]]
    assert text_table(rows, indent="  ") == ["  a    bb  c c", "  aaa", "   a   b   c"]


def test_the_last_column_is_wrapped_first() -> None:
    first, *rest = text_table([["name", "a kind of two words", "word " * 20]])
    assert first.startswith("name  a kind of two words  word word")
    assert all(line.startswith(" " * len("name  a kind of two words  ") + "word") for line in rest)


def test_the_widest_column_is_wrapped_if_the_last_has_no_room() -> None:
    lines = text_table([["name", "a kind of " * 7, "word " * 9]])
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(lines).split().count("kind") == 7
    assert lines[0].startswith("name  a kind of a kind") and lines[0].endswith("word word word")


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_too_long_and_no_word_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    columns = draw.randint(2, 5)
    word = lambda: "x" * draw.randint(1, 70 // columns - 3)  # noqa: E731
    rows = [
        [" ".join(word() for _ in range(draw.randint(0, 9))) for _ in range(columns)]
        for _ in range(draw.randint(1, 6))
    ]
    lines = text_table(rows)
    assert max(map(len, lines)) <= WIDTH
    assert sorted(" ".join(lines).split()) == sorted(
        " ".join(cell for row in rows for cell in row).split()
    )


def test_a_long_word_is_not_broken() -> None:
    assert text_table([["x" * 90, "y"]]) == ["x" * 90 + "  y"]
    assert wrapped("x" * 90) == ["x" * 90]


def test_lines_after_the_first_hang() -> None:
    first, second = wrapped("word " * 20, indent="  ")
    assert first.startswith("  word") and second.startswith("      word") and len(first) <= WIDTH
    assert wrapped("") == []


def test_html_is_escaped() -> None:
    table = html_table(["a", "b"], [["<b>", "&"]])
    assert html_cells(table) == [["a", "b"], ["<b>", "&"]]
