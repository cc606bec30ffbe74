"""The MLP of a block as a mixture of experts: a list of ops, and a loop over experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_ops as tops


def hidden_size(width: int, top_k: int) -> int:
    """The hidden size of one expert: a token's experts together have about as many weights as a
    dense MLP of 4 * width."""
    return max(1, 8 * width // (3 * top_k))


def expert_ops(width: int, experts: int, top_k: int) -> dict[str, tops.FusibleOperation]:
    """Router to Combine, by the names of their modules.

    norm ─ router ─ dispatch ─ up ─ SwiGLU times probability ─ down ─ combine
    """
    hidden = hidden_size(width, top_k)
    router = tops.Router(width, experts, top_k)
    router.set_extra_output_channel(0, "expert_ids", output_to_caller=False)
    router.set_extra_output_channel(1, "probs", output_to_caller=False)
    router.set_extra_output_channel(2, None, output_to_caller=False)
    dispatch = tops.Dispatch(experts)
    dispatch.set_extra_input_channel(0, "expert_ids").set_extra_input_channel(1, "probs")
    for k, name in enumerate(("splits", "permuted_probs", "positions")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    up = tops.GroupedLinear(experts, width, 2 * hidden, bias=False, single_grouped_weight=True)
    down = tops.GroupedLinear(experts, hidden, width, bias=False, single_grouped_weight=True)
    return {
        "router": router,
        "dispatch": dispatch,
        "up": up.set_extra_input_channel(0, "splits"),
        "swiglu": tops.ScaledSwiGLU().set_extra_input_channel(0, "permuted_probs"),
        "down": down.set_extra_input_channel(0, "splits"),
        "combine": tops.Combine().set_extra_input_channel(0, "positions"),
    }


class Weights(nn.Module):
    """A weight by the name that the ops have for it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class TorchExperts(nn.Module):
    """The same as a loop over experts, behind a norm and before dropout."""

    def __init__(self, width: int, experts: int, top_k: int, dropout: float) -> None:
        super().__init__()
        hidden = hidden_size(width, top_k)
        self.top_k = top_k
        self.norm = nn.LayerNorm(width)
        self.router = Weights(experts, width)
        self.up = Weights(experts, 2 * hidden, width)
        self.down = Weights(experts, width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        scores = F.linear(rows, self.router.weight).float().softmax(-1)
        probs, ids = scores.topk(self.top_k)
        probs = probs / probs.sum(-1, keepdim=True)
        y = torch.zeros_like(rows)
        for expert, (up, down) in enumerate(zip(self.up.weight, self.down.weight, strict=True)):
            token, k = (ids == expert).nonzero(as_tuple=True)
            a, b = F.linear(rows[token], up).chunk(2, -1)
            outputs = F.linear((F.silu(a) * b * probs[token, k, None]).to(a.dtype), down)
            y = y.index_add(0, token, outputs.to(y.dtype))
        return self.dropout(y.view_as(x))
