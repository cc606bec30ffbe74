"""Runs a block with an op of the library, and prints what was fused."""

import torch
from my_ops import Softcap

import transformer_ops as tops

torch.manual_seed(0)
head = tops.Sequential(tops.RMSNorm(64), tops.Linear(64, 256, bias=False), Softcap(30.0))
x = torch.randn(8, 64, requires_grad=True)
head(x).sum().backward()
print(head.explain())

compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), head(x))
