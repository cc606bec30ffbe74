"""`transformer_ops/_C.pyi` has what the C++ module has: names, and how many arguments they take."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import transformer_ops
from transformer_ops import _C

STUB = Path(transformer_ops.__file__).parent / "_C.pyi"


def count_of(function: ast.FunctionDef) -> int:
    return len(function.args.args)


def is_property(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(row, ast.Name) and row.id == "property" for row in function.decorator_list
    )


def declared(body: list[ast.stmt]) -> dict[str, int | str]:
    """The number of arguments of each function, or "property"."""
    functions = [row for row in body if isinstance(row, ast.FunctionDef)]
    return {row.name: "property" if is_property(row) else count_of(row) for row in functions}


def found_in(namespace: dict[str, Any]) -> dict[str, int | str]:
    """The same for what pybind11 made, from the signature that it writes into the docstring."""
    found: dict[str, int | str] = {}
    for name, value in namespace.items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property):
            found[name] = "property"
            continue
        text = (getattr(value, "__doc__", None) or "").split("\n")[0]
        if text.startswith(f"{name}("):
            arguments = text[len(name) + 1 : text.index(") -> ")]
            found[name] = len(re.findall(r"\b(?:self|arg\d+): ", arguments))
    return found


def test_functions() -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    assert declared(tree.body) == found_in(vars(_C))


def test_classes() -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    classes = {row.name: declared(row.body) for row in tree.body if isinstance(row, ast.ClassDef)}
    of_module = {name: found_in(vars(v)) for name, v in vars(_C).items() if isinstance(v, type)}
    assert classes == of_module and len(classes) == 6
