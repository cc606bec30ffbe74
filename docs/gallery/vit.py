"""
Train a vision transformer
==========================

A small ViT of transformers learns to tell a square, a disc, a cross and a ring apart, with whole
layers fused, attention included.
"""

import torch
import transformers
from matplotlib import pyplot as plt

import transformer_ops as tops

# %%
# The model
# ---------
# A ViT uses the exact GELU. The fused ops compute the exact GELU, too.

torch.manual_seed(0)
config = transformers.ViTConfig(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
)
config.num_labels = 4
model = transformers.ViTForImageClassification(config)
report = tops.fuse(model)
print(report)

# %%
# The images
# ----------

NAMES = ["square", "disc", "cross", "ring"]


def make_batch(size: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 4, (size,), generator=random)
    centers = torch.randint(13, 19, (size, 2, 1, 1), generator=random)
    y, x = torch.arange(32).view(1, 32, 1) - centers[:, 0], torch.arange(32) - centers[:, 1]
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    distance = (x.square() + y.square()).float().sqrt()
    kinds = [far < 7, distance < 8, (near < 2) & (far < 9), (distance - 8).abs() < 1.5]
    drawn = torch.stack(kinds, 1)[torch.arange(size), labels].float()
    noise = 0.1 * torch.randn(size, 3, 32, 32, generator=random)
    return {"pixel_values": drawn[:, None] + noise, "labels": labels}


random = torch.Generator().manual_seed(0)
batch = make_batch(4, random)
figure, panels = plt.subplots(1, 4, figsize=(8, 2.2), layout="constrained")
for axes, image, label in zip(panels, batch["pixel_values"], batch["labels"], strict=True):
    axes.imshow(image.mean(0), cmap="gray")
    axes.set_title(NAMES[int(label)])
    axes.axis("off")
figure.show()

# %%
# Training
# --------

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, shares = [], []
for _ in range(60):
    batch = make_batch(32, random)
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(output.loss.item())
    shares.append((output.logits.argmax(-1) == batch["labels"]).float().mean().item())

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(losses, label="loss")
axes.plot(shares, label="share of right answers")
axes.set_xlabel("step")
axes.legend()
figure.show()

# %%
# What a layer does
# -----------------
# ``fused.explain()`` of a layer shows the plan of its last call.

print(model.vit.layers[0].fused.explain())
