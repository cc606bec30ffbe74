"""Every Sequential that a page on ops and fusions of one's own calls also runs in float32, float64
and under autocast, eager and compiled, forward and backward. Gallery pages are among them."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from helpers import as_tuple
from test_docs import PAGES, ROOT, run
from torch import Tensor

import transformer_ops as tops
from transformer_ops import testing

OWN = re.compile(r"^ *class \w+\(tops\.(BasicOperation|FusedOperation)\)", re.MULTILINE)
GALLERY = sorted((ROOT / "docs" / "gallery").glob("*.py"))
WITH_OPS = [page for page in (*PAGES, *GALLERY) if OWN.search(page.read_text(encoding="utf-8"))]
MODES = ("float32", "float64", "autocast")


@contextmanager
def seen_calls(see: Callable[..., None]) -> Iterator[None]:
    """In this scope, `see` gets each eager call of a Sequential first, and one with each checked
    fusion."""
    plain, is_seeing = tops.Sequential.__call__, False

    def see_once(*args: Any, **kwargs: Any) -> None:
        nonlocal is_seeing
        is_seeing = True
        try:
            see(*args, **kwargs)
        finally:
            is_seeing = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not is_seeing:
            see_once(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    def check_fusion(fusion: Any, make: Any, *args: Any, kind: str, pattern: Any = None) -> Any:
        register = getattr(tops, f"register_{kind}_fusion")
        with register(fusion, **({"pattern": pattern} if pattern else {})):
            see_once(tops.Sequential(*make()), *args)
        return testing.FusionCheck(kind)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tops.Sequential, "__call__", call)
        patched.setattr(testing, "check_fusion", check_fusion)
        yield


@torch.enable_grad()
def results(
    module: tops.Sequential, mode: str, is_compiled: bool, args: Any, op_kwargs: Any
) -> list[Tensor]:
    """The outputs and gradients of a copy."""
    dtype = torch.float64 if mode == "float64" else torch.float32
    own = copy.deepcopy(module).to(dtype)
    names = {id(m): name for name, m in module.named_modules()}
    given = {own.get_submodule(names[id(op)]): kw for op, kw in (op_kwargs or {}).items()}
    inputs = [a.detach().to(dtype).requires_grad_() for a in args]
    called: Any = torch.compile(own, backend="aot_eager") if is_compiled else own
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        outputs = as_tuple(called(*inputs, **({"op_kwargs": given} if given else {})))
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.autograd.backward([output.double().square().sum() for output in wanted])
    leaves = [*inputs, *own.parameters()]
    assert all(leaf.grad is None or leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.takes(seconds=60)
@pytest.mark.parametrize("page", WITH_OPS, ids=lambda page: page.name)
def test_examples_in_every_mode(page):
    count = 0

    def see(module: tops.Sequential, *args: Any, op_kwargs: Any = None) -> None:
        nonlocal count
        wanted = results(module, "float64", False, args, op_kwargs)
        for mode in MODES:
            for is_compiled in (False, True):
                found = results(module, mode, is_compiled, args, op_kwargs)
                tolerance = 0.1 if mode == "autocast" else 1e-4
                for a, b in zip(found, wanted, strict=True):
                    error = (a.double() - b).norm() / (b.norm() + 1e-6)
                    assert error < tolerance, (mode, is_compiled, module, error)
        torch._dynamo.reset()
        count += 1

    plots = MagicMock(**{"pyplot.subplots.return_value": (MagicMock(), MagicMock())})
    modules = {"matplotlib": plots, "matplotlib.pyplot": plots.pyplot}
    with seen_calls(see), contextlib.redirect_stdout(io.StringIO()):
        if page in GALLERY:
            with patch.dict(sys.modules, modules):
                runpy.run_path(str(page))
        else:
            run(page)
    assert count > 0
