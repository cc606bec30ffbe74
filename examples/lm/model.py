"""A byte-level GPT whose blocks are transformer_ops Sequentials, and the same in torch.nn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.parallel import local

from .experts import TorchExperts, expert_ops

VOCABULARY = 256
# A position embeds this many of its last bytes: the first block starts from n-grams, which
# attention would need most of a short run to discover.
RECENT = 4


class Block(nn.Module):
    """Attention and MLP, each in front of a residual addition.

    x ─┬─ norm ─ qkv ─ attention ─ project ─ dropout ─ + ─ y
       └───────────────────────────────────────────────┘
    y ─┬─ norm ─ up ─ GELU ─ down ─ dropout ─ +        or experts in place of up to down
       └──────────────────────────────────────┘
    """

    def __init__(self, width: int, dropout: float, saved: str, experts: int, top_k: int) -> None:
        super().__init__()
        # Any width works; multiples of 32 get heads of the usual size.
        self.head_size = math.gcd(width, 32)
        self.attention_in = tops.Sequential(
            {"norm": tops.LayerNorm(width), "qkv": tops.Linear(width, 3 * width)}, saved=saved
        )
        self.attention_out = tops.Sequential(
            {
                "project": tops.Linear(width, width),
                "dropout": tops.Dropout(dropout),
                "add": tops.AddExtraInput(),
            },
            saved=saved,
        )
        dense = {
            "up": tops.Linear(width, 4 * width),
            "gelu": tops.GELU(),
            "down": tops.Linear(4 * width, width),
        }
        self.mlp = tops.Residual(
            {
                "norm": tops.LayerNorm(width),
                **(expert_ops(width, experts, top_k) if experts else dense),
                "dropout": tops.Dropout(dropout),
            },
            saved=saved,
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = attention(self.attention_in(x), self.head_size)
        return self.mlp(self.attention_out(mixed, x))


class TorchBlock(nn.Module):
    """The same in torch.nn, with the same names in its state dict."""

    def __init__(self, width: int, dropout: float, experts: int, top_k: int) -> None:
        super().__init__()
        self.head_size = math.gcd(width, 32)
        self.attention_in = nn.Sequential()
        self.attention_in.add_module("norm", nn.LayerNorm(width))
        self.attention_in.add_module("qkv", nn.Linear(width, 3 * width))
        self.attention_out = nn.Sequential()
        self.attention_out.add_module("project", nn.Linear(width, width))
        self.attention_out.add_module("dropout", nn.Dropout(dropout))
        if experts:
            self.mlp: nn.Module = TorchExperts(width, experts, top_k, dropout)
            return
        self.mlp = nn.Sequential()
        self.mlp.add_module("norm", nn.LayerNorm(width))
        self.mlp.add_module("up", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU(approximate="tanh"))
        self.mlp.add_module("down", nn.Linear(4 * width, width))
        self.mlp.add_module("dropout", nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(attention(self.attention_in(x), self.head_size))
        return x + self.mlp(x)


def attention(qkv: Tensor, head_size: int) -> Tensor:
    """Causal attention of `[batch, time, 3 * width]`: head by head its query, key and value."""
    # Whole heads lie side by side, so that ranks can share them out.
    heads = qkv.unflatten(-1, (-1, 3, head_size))
    q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    """Bytes `[batch, time]` and the bytes that follow each → mean cross-entropy in nats."""

    def __init__(
        self,
        backend: str,
        *,
        context: int,
        layers: int,
        width: int,
        dropout: float,
        saved: str = "exact",
        experts: int = 0,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        ours = backend == "tops"
        if saved != "exact" and not ours:
            raise ValueError(f"saved must be 'exact' in torch.nn, got {saved!r}")
        self.context = context
        self.tokens = nn.Embedding(RECENT * VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, dropout, saved, experts, top_k)
            if ours
            else TorchBlock(width, dropout, experts, top_k)
            for _ in range(layers)
        )
        if ours:
            self.head: nn.Module = tops.Sequential(
                tops.LayerNorm(width), tops.Linear(width, VOCABULARY, bias=False), saved=saved
            )
        else:
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def logits(self, inputs: Tensor) -> Tensor:
        """`[batch, time]` → `[batch, time, 256]`."""
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def embed(self, inputs: Tensor) -> Tensor:
        """What goes into the first block."""
        recent = F.pad(inputs, (RECENT - 1, 0)).unfold(-1, RECENT, 1)
        tables = VOCABULARY * torch.arange(RECENT, device=inputs.device)
        # Where ranks share a model, each embeds windows of its own.
        tokens, positions = (
            local(table.weight, partial=True) for table in (self.tokens, self.positions)
        )
        return F.embedding(recent + tables, tokens).sum(-2) + positions[: inputs.shape[-1]]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialize(model: GPT, seed: int) -> None:
    """Weights that depend on names, shapes and the seed alone: both backends start equal.

    As in GPT-2 (Radford et al. 2019), with the spread by fan-in, and less of it where a branch
    joins the residual.
    """
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * len(model.blocks)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.startswith(("tokens", "positions", "head")):
                parameter.normal_(std=0.02, generator=generator)
            else:
                std = parameter.shape[-1] ** -0.5
                if name.endswith(("project.weight", "down.weight")):
                    std *= branches**-0.5
                parameter.normal_(std=std, generator=generator)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """`length` bytes that follow the prompt, drawn one by one."""
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    model.eval()
    for _ in range(length):
        logits = model.logits(text[:, -model.context :])[:, -1].float().cpu()
        chances = torch.softmax(logits / temperature, dim=-1)
        chosen = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, chosen.to(device)], dim=1)
    return bytes(text[0].tolist())
