"""Writes docs/reference.md from the declarations of ops and fusions, and the stub that tells type
checkers and editors which ops there are.

python tools/make_reference.py            writes the files
python tools/make_reference.py --check    exits with 1 if they are not up to date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformer_ops as tops
from transformer_ops import _C

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference.md"
STUB = ROOT / "transformer_ops" / "ops" / "__init__.pyi"

INTRO = """\
# Reference

Written by `tools/make_reference.py` from the declarations in `csrc/ops/` and `csrc/fusions/`; do
not edit. The docstring of each class has shapes, dtypes, errors and the source of its formula.

- x is the input, a and b its first and its second half along the last dimension.
- h is the last dimension of the op's input, B the bytes of one of its elements.
- *Keeps* is what backward reads when nothing is fused, in bytes a row of the input. Each tensor
  is kept once however many ops read it; parameters do not count. Statistics take 8 bytes in
  float64.
- Extra tensors are written *in / out*.
"""


SLOTS = """\
## Slots

What a fusion in Python saves for the backward of an op, in this order. *dtype* is that in which the
op computes; n is the number of elements of its input. A slot may be None if backward does not read
it.
"""

STATISTIC = "float32, or float64 in float64"
# (shape, dtype) of slots by name. A slot with another name must be added.
SLOT_TEXTS = {
    "input": ("(..., h)", "*dtype*"),
    "mask": ("(ceil(n / 8),)", "uint8"),
    "mean": ("that of the input without the normalized dimensions", STATISTIC),
    "rstd": ("that of the input without the normalized dimensions", STATISTIC),
    "factors": ("(first dimension of the input,)", STATISTIC),
    "positions": ("(rows, top_k)", "int32"),
    "output": ("(..., num_heads * head_dim)", "*dtype*"),
    "hidden": ("(..., sum of the ranks)", "that of the adapters"),
    "log_sum_exp": ("(..., num_heads)", STATISTIC),
    "seed": ("(2,), or (0,) without dropout", "int64"),
    "statistics": ("(rows,)", STATISTIC),
    "grads_input": ("(rows, h), or (0,) if it is not computed in forward", "*dtype*"),
    "grads_weight": ("that of the weight, or (0,)", "*dtype*"),
    "grads_bias": ("that of the bias, or (0,)", "*dtype*"),
}


def reference() -> str:
    """The text of the page."""
    kinds = {row["kind"]: row for row in _C.declarations()}
    of_class = {name: getattr(getattr(tops, name), "_kinds", ()) for name in tops.ops.__all__}
    ops = [kinds[kind] for found in of_class.values() for kind in found]
    containers = [name for name, found in of_class.items() if not found]
    rules = [row for row in _C.rules() if row["origin"] == "built-in"]
    parts = [
        INTRO,
        "## Basic ops\n",
        table(["op", "computes", "parameters", "extra", "keeps"], map(op_row, ops)),
        SLOTS,
        table(["op", "slot", "shape", "dtype"], (line for row in ops for line in slot_rows(row))),
        "## Constructors\n",
        "```text",
        *(constructor(name) for name in sorted(of_class)),
        "```\n",
        *(container(name) for name in containers),
        "## Fusions\n",
        "In the order they run. Of two rules of a pass, the one with more benefit comes first;\n"
        "users' fusions come before both. *Joint* means forward and backward together. An op in\n"
        "brackets may be absent; a match has two ops at least.\n",
        table(["rule", "pass", "benefit", "ops"], map(rule_row, rules)),
        "## Typed ops\n",
        "Each is `torch.ops.transformer_ops.<name>`: functional, never returns an alias of an\n"
        "argument. `aten::` names an op of torch's own. Absent: the tensor itself is the result.\n",
        *(typed_ops(row["kind"], row) for row in ops),
        *(typed_ops(f"fusion {row['name']}", row) for row in rules),
    ]
    return "\n".join(filter(None, parts))


def stub() -> str:
    """Static imports of what `transformer_ops/ops/__init__.py` finds when it runs."""
    modules: dict[str, list[str]] = {}
    for name in tops.ops.__all__:
        modules.setdefault(getattr(tops, name).__module__.rpartition(".")[2], []).append(name)
    lines = ["# Written by tools/make_reference.py; do not edit."]
    for module, names in sorted(modules.items()):
        lines += [f"from .{module} import {name} as {name}" for name in sorted(names)]
    listed = "".join(f'    "{name}",\n' for name in tops.ops.__all__)
    return "\n".join(lines) + f"\n\n__all__ = [\n{listed}]\n"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def op_row(row: dict[str, Any]) -> list[str]:
    """One op."""
    extra = {"takes": row["extra_inputs"], "gives": row["extra_outputs"]}
    return [
        f"`{row['kind']}`",
        code(row["summary"]),
        tensors(row, row["parameters"]) or "-",
        "; ".join(f"{verb} {tensors(row, names)}" for verb, names in extra.items() if names) or "-",
        keeps(row) or "-",
    ]


def tensors(row: dict[str, Any], names: list[str]) -> str:
    """Tensors that an op takes or gives by name."""
    marks = {name: " (integers)" for name in row["integers"]}
    marks |= {name: " (no gradient)" for name in row["constants"]}
    marks |= {name: " (no gradient)" for name in row["detached"]}
    marks |= {name: " (a list)" for name in row["lists"]}
    marks |= {name: marks.get(name, "") + " (or None)" for name in row["optional"]}
    return ", ".join(f"`{name}`{marks.get(name, '')}" for name in names)


def keeps(row: dict[str, Any]) -> str:
    """The slots of an op with their bytes a row."""
    found = []
    for slot, needed_for, when in zip(row["slots"], row["needed_for"], row["when"], strict=True):
        size = size_text(row["kind"], slot)
        if size:
            gradients = " or ".join(f"`{name}`" for name in needed_for)
            conditions = [f"{gradients} needs a gradient"] if needed_for else []
            conditions += [f"`{when}`"] if when else []
            condition = f" (where {' and '.join(conditions)})" if conditions else ""
            found.append(f"`{slot}` {size}{condition}")
    return ", ".join(found)


def slot_rows(row: dict[str, Any]) -> list[list[str]]:
    """The shape and dtype of each slot of an op."""
    return [[f"`{row['kind']}`", f"`{slot}`", *slot_text(row, slot)] for slot in row["slots"]]


def slot_text(row: dict[str, Any], slot: str) -> tuple[str, str]:
    """(shape, dtype) of a slot."""
    if slot in row["parameters"]:
        return "that of the parameter", "that of the parameter"
    if slot in (*row["extra_inputs"], "expert_ids"):
        return "that of the extra tensor", "that of the extra tensor"
    return SLOT_TEXTS[slot]


def size_text(kind: str, slot: str) -> str:
    """Bytes a row as a formula; empty for a parameter, which is there anyway."""
    width, bits = 4096, 16
    found = _C.slot_bits(kind, slot, width, bits)
    known = {0: "", width: "h/8", width * bits: "hB", -1: "(depends on the inputs)"}
    return known[found] if found in known else f"{found / 8:g}"


def constructor(name: str) -> str:
    """The call as one would write it."""
    signature = inspect.signature(getattr(tops, name))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return name + str(signature.replace(parameters=plain, return_annotation=signature.empty))


def container(name: str) -> str:
    """What a container stands for."""
    doc = inspect.getdoc(getattr(tops, name)) or ""
    return f"`{name}`: {doc.split(chr(10) * 2)[0]}\n"


def rule_row(row: dict[str, Any]) -> list[str]:
    """One fusion."""
    pattern = " + ".join(
        entry(names, optional)
        for names, optional in zip(row["pattern"], row["optional"], strict=True)
    )
    name = "joint" if row["pass"] == "forward_backward" else row["pass"]
    return [f"`{row['name']}`", name, str(row["benefit"]), pattern]


def entry(kinds: list[str], optional: bool) -> str:
    """One entry of a pattern."""
    if optional:
        return f"[{', '.join(kinds)}]"
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def typed_ops(title: str, row: dict[str, Any]) -> str:
    """The schemas of one declaration."""
    schemas = [schema for schema in (row["forward"], row["backward"]) if schema]
    return f"**{title}**\n\n```text\n" + "\n".join(schemas) + "\n```\n" if schemas else ""


def code(text: str) -> str:
    """Formulas hold characters that Markdown would take for its own."""
    return f"`{text}`"


def main() -> None:
    """The command line."""
    for path, text in ((PAGE, reference()), (STUB, stub())):
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} must be up to date, run: python tools/make_reference.py")


if __name__ == "__main__":
    main()
