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
# ``saved_tensors_hooks`` sees each tensor that is saved for backward. A hook in front of each part
# says which part runs. Storages count once, and parameters do not count.


def saved_by_part(parts: dict[str, torch.nn.Module]) -> dict[str, int]:
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    counts = dict.fromkeys(["embedding", *parts, "loss"], 0)
    seen = []
    current = "embedding"

    def enter(name):
        def hook(module, args, kwargs):
            nonlocal current
            current = name

        return hook

    def leave(module, args, output):
        nonlocal current
        current = "loss"

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            own.add(storage.data_ptr())
            counts[current] += storage.nbytes()
            seen.append(storage)  # so that no address is used twice
        return tensor

    handles = [
        module.register_forward_pre_hook(enter(name), with_kwargs=True)
        for name, module in parts.items()
    ]
    handles.append(model.lm_head.register_forward_hook(leave))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens, labels=tokens)
    for handle in handles:
        handle.remove()
    del output
    return counts


parts = {f"layer {i}": layer for i, layer in enumerate(model.model.layers)}
parts |= {"norm": model.model.norm, "head": model.lm_head}
before = saved_by_part(parts)
report = tops.fuse(model)
print(report)
after = saved_by_part(parts)

# %%
# The picture
# -----------
# The layers save less. The loss is PyTorch's, and saves what it saved before.

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for offset, (name, counts) in zip(
    (-0.2, 0.2), {"plain": before, "fused": after}.items(), strict=True
):
    places = [place + offset for place in range(len(counts))]
    axes.bar(places, [count / 1024 for count in counts.values()], 0.38, label=name)
axes.set_xticks(range(len(before)), list(before), fontsize=8)
axes.set_ylabel("KiB saved for backward")
axes.legend()
figure.show()

# %%
# Within a layer, ``explain()`` says which op saves what.

print(model.model.layers[0].fused.explain())
