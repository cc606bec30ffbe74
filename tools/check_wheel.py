"""Checks an installed wheel: python tools/check_wheel.py TORCH. tools/build_wheel.py runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import transformer_ops as tops
from transformer_ops import _C


class Block(nn.Module):
    """A feed-forward as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def check_libraries(version: str) -> None:
    package, library = Path(tops.__file__).parent, Path(_C.__file__)
    minor = ".".join(version.split(".")[:2])
    assert torch.__version__.startswith(version), torch.__version__
    assert "site-packages" in package.parts, package
    assert library.parent == package / "lib" / f"torch{minor}", library
    level = os.environ.get("TRANSFORMER_OPS_ISA")
    assert level is None or tops.processor().kernels == level, tops.processor()


def check_unknown_torch() -> None:
    """Another torch is an error that names the versions inside."""
    code = "import torch; torch.__version__ = '2.99.0'; import transformer_ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    minors = [folder.name for folder in Path(_C.__file__).parents[1].glob("torch*")]
    assert said.startswith("ImportError: transformer_ops is built for torch "), said
    assert all(minor.removeprefix("torch") in said for minor in minors), said
    assert "got torch 2.99.0: run `pip install 'torch==" in said, said
    print(said)


def check_fused_model() -> None:
    """A fused model trains as the plain one does, eager and compiled."""
    torch.manual_seed(0)
    plain, fused = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    fused.load_state_dict(plain.state_dict())
    report = tops.fuse(fused)
    print(report)
    assert report.fused, "something must be fused"
    x = torch.randn(4, 32)
    for call in (fused, torch.compile(fused, fullgraph=True, backend="aot_eager")):
        fused.zero_grad()
        plain.zero_grad()
        loss, wanted = call(x).square().mean(), plain(x).square().mean()
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted)
        for found, expected in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)


if __name__ == "__main__":
    check_libraries(sys.argv[1])
    check_unknown_torch()
    check_fused_model()
    print(f"torch {torch.__version__}: {tops.processor()}")
