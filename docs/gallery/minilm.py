"""
Fine-tune an encoder
====================

An encoder of MiniLM's shape, made small, learns to tell four topics apart. The model is trained
twice: as it is, and with ``tops.fuse``. ``examples/finetune.py minilm`` does the same in full size.
"""

import copy
from pydoc_data.topics import topics

import torch
import transformers
from matplotlib import pyplot as plt

import transformer_ops as tops

# %%
# The model
# ---------
# Dropout is off, so that both runs compute the same. In a run of your own, leave it on.

torch.manual_seed(0)
config = transformers.BertConfig(
    hidden_size=96,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=3,
    vocab_size=256,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
config.num_labels = 4
plain = transformers.BertForSequenceClassification(config)
fused = copy.deepcopy(plain)
report = tops.fuse(fused)
print(report)

# %%
# The data
# --------
# A batch has passages of the four longest topics of Python's manual. The topic is the label.

texts = [text.encode() for text in sorted(topics.values(), key=len)[-4:]]


def make_batch(size: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 4, (size,), generator=random)
    rows = []
    for label in labels.tolist():
        start = int(torch.randint(0, len(texts[label]) - 64, (), generator=random))
        rows.append(torch.tensor(list(texts[label][start : start + 64])))
    return {"input_ids": torch.stack(rows), "labels": labels}


# %%
# Training
# --------


def train(model: torch.nn.Module, steps: int = 80) -> list[float]:
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(**make_batch(32, random)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


losses = {"plain": train(plain), "fused": train(fused)}

# %%
# The result
# ----------
# Both runs take the same steps. The fused model saves fewer bytes for backward.

saved = report.saved_bytes(**make_batch(32, torch.Generator().manual_seed(1)))
figure, (curves, bars) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for style, (name, values) in zip(("-", "--"), losses.items(), strict=True):
    means = [sum(values[i - 10 : i]) / 10 for i in range(10, len(values) + 1)]
    curves.plot(range(10, len(values) + 1), means, style, label=name)
curves.set(xlabel="step", ylabel="loss, mean of 10 steps")
curves.legend()
bars.bar(["plain", "fused"], [count / 2**20 for count in saved], color=["C0", "C1"])
bars.set_ylabel("MiB saved for backward")
figure.show()
