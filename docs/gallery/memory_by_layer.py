"""
Saved memory by layer
=====================

Which part of a model saves how many bytes for backward? This page counts them for each layer,
before and after ``tops.fuse``.
"""

import torch
import transformers
from matplotlib import pyplot as plt

import transformer_ops as tops

# %%
# The model
# ---------

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=1024,
)
model = transformers.LlamaForCausalLM(config)
tokens = torch.randint(0, 1024, (2, 128))

# %%
# Counting
# --------
# ``report.layers`` runs the model twice, and counts what each layer saves. Storages count once, and
# parameters do not count.

report = tops.fuse(model)
print(report)
layers = report.layers(input_ids=tokens, labels=tokens)
print(layers)

# %%
# The picture
# -----------
# The layers save less. "(the model)" is the head and its loss. Without ops it saves the logits of
# all rows. With ops it saves the gradients of the head's weight and input, which forward computes.
# ``layers.save("layers.svg")`` draws this picture without matplotlib.

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for offset, label in ((-0.2, "before"), (0.2, "after")):
    counts = [getattr(row, label) / 1024 for row in layers.rows]
    axes.bar([i + offset for i in range(len(counts))], counts, 0.38, label=label)
names = [row.path.removeprefix("model.") or "(the model)" for row in layers.rows]
axes.set_xticks(range(len(names)), names, fontsize=8)
axes.set_ylabel("KiB saved for backward")
axes.legend()
figure.show()

# %%
# Within a layer, ``explain()`` says which op saves what.

print(model.model.layers[0].fused.explain())
