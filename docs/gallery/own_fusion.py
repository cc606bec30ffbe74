"""
A fusion of your own
====================

A fusion replaces a run of basic ops by one step. This page registers one in Python, looks at the
plan, and verifies it. :doc:`/fusions` describes every kind of fusion.
"""

import torch
from matplotlib import pyplot as plt

import transformer_ops as tops
from transformer_ops.testing import check_fusion

# %%
# The block
# ---------
# ``explain()`` prints a plan: the steps of forward and backward, and the bytes saved for backward.


def make_block() -> list[torch.nn.Module]:
    return [tops.LayerNorm(64), tops.Linear(64, 256, bias=False), tops.SiLU()]


torch.manual_seed(0)
block = tops.Sequential(*make_block())
x = torch.randn(128, 64)
block(x).sum().backward()
print(block.explain())

# %%
# The fused op
# ------------
# ``RecomputedLinearSiLU`` saves the input of the product and its weight. Its backward computes the
# product again, so the input of the SiLU is not saved.


class RecomputedLinearSiLU(tops.FusedOperation):
    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        weight = self.basic_ops[0].weight
        output = torch.nn.functional.silu(input_ @ weight.T)
        return output, [(), ()], (input_, weight)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, weight = basic_op_ctxs[0].saved_tensors
        hidden = x @ weight.T
        s = torch.sigmoid(hidden)
        grad = grad_output * s * (1 + hidden * (1 - s))
        grad_weight = torch.einsum("...o,...i->oi", grad, x)
        return grad @ weight, [(grad_weight,), ()], [(), ()]


# %%
# Register and verify it
# ----------------------
# ``check_fusion`` raises an error unless the fusion is in the plan and outputs and gradients equal
# those of the unfused ops, in eager mode and under ``torch.compile``.

pattern = [tops.BasicLinear, tops.SiLU]
check_fusion(
    RecomputedLinearSiLU, make_block, torch.randn(4, 64), kind="forward_backward", pattern=pattern
)

with tops.register_forward_backward_fusion(RecomputedLinearSiLU, pattern=pattern):
    block(x).sum().backward()
    print(block.explain())

# %%
# What it saves
# -------------
# The handle unregistered the fusion at the end of the ``with`` block, so the next call is planned
# without it. ``saved_tensors_hooks`` counts what autograd saves.


def saved_bytes(module: torch.nn.Module) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    del output
    return sum(saved.values())


without = saved_bytes(block)
with tops.register_forward_backward_fusion(RecomputedLinearSiLU, pattern=pattern):
    with_it = saved_bytes(block)

figure, axes = plt.subplots(figsize=(6, 1.8), layout="constrained")
axes.barh(["built-in fusions", "RecomputedLinearSiLU"], [without / 1024, with_it / 1024])
axes.invert_yaxis()
axes.set_xlabel("KiB saved for backward")
figure.show()
