"""Adapters of PEFT of rank 16 on the models of models.py, on a base as it is (LoRA) or in 4 bits
(QLoRA): plain PEFT on the plain base, and with `tops.fuse`.

    python benchmarks/adapters.py            all of it
    python benchmarks/adapters.py --quick    two of them, without Inductor

The rows are those of models.py, for training alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import peft
import torch
from models import MODELS, Model, model_rows
from suite.rows import Row, run
from torch import nn

import transformer_ops as tops

# Names of modules with adapters.
TARGETS: dict[str, str | list[str]] = {
    "LoRA on q and v": ["q_proj", "v_proj", "query", "value"],
    "LoRA on all linear layers": "all-linear",
}
QUICK = (
    "MiniLM shape, 16 x 128 tokens, dropout 0.1, LoRA on q and v",
    "ViT-S/16, 8 images, LoRA on all linear layers, base as nf4",
)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def adapted(case: Model, what: str, base: str | None) -> Model:
    """The same model with adapters on a frozen base."""

    def adapt(model: Any) -> nn.Module:
        # In float32, as PEFT makes them on a base of any dtype.
        config = peft.LoraConfig(r=16, target_modules=TARGETS[what])
        found: nn.Module = peft.get_peft_model(model, config)
        return found

    time = (0.72, 0.75) if base is None else (1.0, 1.0)
    is_compiled = base is None and TARGETS[what] == "all-linear" and case.inductor is not None
    inductor = 1.0 if is_compiled else None
    return case._replace(adapt=adapt, time=time, inductor=inductor, saved=0.55, base=base)


def all_cases() -> Iterator[tuple[str, Model, tuple[torch.dtype, ...]]]:
    """(name, model, dtypes)."""
    for name, case in list(MODELS.items())[:-1]:
        for what in TARGETS:
            yield f"{name}, {what}", adapted(case, what, None), (FLOAT32, BFLOAT16)
        # Such a base is compared with one in bfloat16.
        yield f"{name}, {what}, base as nf4", adapted(case, what, "nf4"), (BFLOAT16,)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    for name, case, dtypes in all_cases():
        if not quick or name in QUICK:
            # A step of torch in bfloat16 takes a minute on processors that do not multiply it.
            is_slow = quick and not tops.processor().multiplies_bfloat16
            for dtype in (FLOAT32,) if is_slow else dtypes[:1] if quick else dtypes:
                yield from model_rows(name, case, dtype, quick, seconds=8.0, sizes=())


if __name__ == "__main__":
    sys.exit(run("adapters", __doc__ or "", rows))
