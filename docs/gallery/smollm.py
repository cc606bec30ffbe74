"""
A training step of a decoder
============================

One training step of a decoder of SmolLM's kind, made small: what ``tops.fuse`` changes in its
numbers, and in the ops that PyTorch's profiler sees.
"""

import copy

import torch
import transformers
from matplotlib import pyplot as plt
from torch.profiler import ProfilerActivity, profile

import transformer_ops as tops

# %%
# The model
# ---------

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    vocab_size=512,
)
plain = transformers.LlamaForCausalLM(config)
fused = copy.deepcopy(plain)
report = tops.fuse(fused)
print(report)

# %%
# One step
# --------
# Loss and gradients are those of the plain model, up to rounding.

tokens = torch.randint(0, 512, (2, 128))


def step(model: torch.nn.Module) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


difference = abs(step(plain) - step(fused)).item()
pairs = zip(plain.parameters(), fused.parameters(), strict=True)
errors = [((b.grad - a.grad).norm() / a.grad.norm()).item() for a, b in pairs]
print(f"difference of the losses: {difference:.1e}")
print(f"largest relative difference of a gradient: {max(errors):.1e}")

# %%
# What ran
# --------
# The profiler lists the ops of this library by name. Each took the place of several ops of PyTorch.


def count_ops(model: torch.nn.Module) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model)
    return {event.key: event.count for event in profiler.key_averages()}


before, after = count_ops(plain), count_ops(fused)
print(f"ops of PyTorch and this library: {sum(before.values())} plain, {sum(after.values())} fused")
for name in sorted(after):
    if name.startswith("transformer_ops::"):
        print(f"{after[name]:4d} x {name}")

# %%
# What it saves
# -------------

without, with_ops = report.saved_bytes(input_ids=tokens, labels=tokens)
figure, axes = plt.subplots(figsize=(6, 1.8), layout="constrained")
axes.barh(["plain", "fused"], [without / 2**20, with_ops / 2**20], color=["C0", "C1"])
axes.invert_yaxis()
axes.set_xlabel("MiB saved for backward")
figure.show()
