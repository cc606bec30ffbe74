"""Lists comments and docstrings that begin without a subject, such as "Of both operands.".

python tools/check_comments.py [FILE...]

Without files it reads the sources of the whole tree. It prints a line for each such comment and a
count for each kind, and exits with 1 if any comment begins with "Of", "That of" or "Those of".
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("csrc", "transformer_ops", "tests", "tools", "benchmarks", "examples")
ENDINGS = (".h", ".cpp", ".cu", ".cuh", ".py")

# A comment of one of these kinds makes the tool fail; the others are listed only.
FAILING = ("Of", "That of", "Those of")
KINDS = {
    "Of": r"Of\b",
    "That of": r"That of\b",
    "Those of": r"Those of\b",
    "PREPOSITION which": r"(?:At|By|For|From|In|On|To|With) which\b",
    "Beside": r"Beside\b",
    "As ... has it": r"As\b[^.;:]*\b(?:has|have) (?:it|them)\b",
}

# A string hides the comment marks in it, so strings are read too. The raw strings come first.
CPP_TOKEN = re.compile(
    r'R"(?P<mark>[^ ()\\]*)\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


class Comment(NamedTuple):
    line: int
    text: str


class Line(NamedTuple):
    """A comment of one line. `alone` is False if code stands before it."""

    number: int
    column: int
    text: str
    alone: bool


def joined(lines: Iterator[Line]) -> Iterator[Comment]:
    """Joins lines that follow each other in one column; only the first may stand after code."""
    start, last, texts = 0, (0, 0), list[str]()
    for number, column, text, alone in lines:
        if texts and not (alone and (number, column) == (last[0] + 1, last[1])):
            yield Comment(start, " ".join(texts))
            texts = []
        if not texts:
            start = number
        texts.append(text)
        last = (number, column)
    if texts:
        yield Comment(start, " ".join(texts))


def cpp_lines(source: str) -> Iterator[Line]:
    for match in CPP_TOKEN.finditer(source):
        if match["comment"] is None:
            continue
        start = source.rfind("\n", 0, match.start()) + 1
        before = source[start : match.start()]
        text = match["comment"].removesuffix("*/").lstrip("/*!<").strip()
        yield Line(source.count("\n", 0, start) + 1, len(before), text, not before.strip())


def python_lines(source: str) -> Iterator[Line]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            yield Line(*token.start, token.string.lstrip("#:!").strip(), alone)


def docstrings(source: str) -> Iterator[Comment]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield Comment(node.body[0].lineno, text)


def comments(path: Path) -> list[Comment]:
    source = path.read_text()
    if path.suffix != ".py":
        return list(joined(cpp_lines(source)))
    return sorted([*joined(python_lines(source)), *docstrings(source)])


def kind(text: str) -> str | None:
    """The kind of a text without a subject, or None."""
    return next((name for name, pattern in KINDS.items() if re.match(pattern, text)), None)


def sources() -> list[Path]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in ENDINGS)


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    total = 0
    for path in map(Path, arguments) if arguments else sources():
        for line, text in comments(path):
            total += 1
            if name := kind(text):
                counts[name] += 1
                shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                print(f"{shown}:{line}: {text.splitlines()[0]}")
    found = ", ".join(f'{counts[name]} "{name}"' for name in KINDS)
    print(f"{total} comments and docstrings, without a subject: {found}")
    if any(counts[name] for name in FAILING):
        print("A comment must be a sentence with a subject, or name a thing: see CONTRIBUTING.md")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
