"""The source of a random module: what stands above its class, and the parts that it may call."""

from __future__ import annotations

import re

WIDTH, HIDDEN, BATCH, ROWS = 8, 12, 2, 3

PRELUDE = f"""
import functools
import math
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu

D, H, T = {WIDTH}, {HIDDEN}, {ROWS}
LOG, FACTOR, ON, COUNT = [], 0.5, True, 0
SETTINGS = types.SimpleNamespace(scale=0.75, act="silu", approximate="tanh", on=True)
ACTS = {{"silu": F.silu, "gelu": F.gelu, "relu": F.relu}}


def note(value):
    LOG.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
    return value


def noting_own(part, *others):
    # A hook for all modules, which looks at those of one model.
    if any(part is one for one in m.modules()):
        note(type(part).__name__)


def tick():
    global COUNT
    COUNT += 1
    return COUNT


def noting(function):
    @functools.wraps(function)
    def inside(*args, **kwargs):
        note("called")
        return function(*args, **kwargs)

    return inside


def doubling(function):
    return functools.wraps(function)(lambda self, x, *a, **k: function(self, x * 2, *a, **k))


def renamed(function):
    function.__name__ = "renamed"
    return function


def apply_chunking_to_forward(forward, size, dim, *tensors):
    if size > 0:
        parts = zip(*(t.split(size, dim) for t in tensors))
        return torch.cat([forward(*one) for one in parts], dim)
    return forward(*tensors)


def helper(t):
    return t * FACTOR


def act(t):
    return F.silu(t)
"""

# These are in the source only if something names them. Forms that rules know, and some that differ.
PARTS = {
    "LlamaNorm": """
class LlamaNorm(nn.Module):
    def __init__(self, shape, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
""",
    "GemmaNorm": """
class GemmaNorm(nn.Module):
    def __init__(self, shape, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) - 0.5)
        self.eps = eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)
""",
    "OffsetNorm": """
class OffsetNorm(nn.Module):
    def __init__(self, shape, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.eps, self.dim, self.add_unit_offset = eps, -1, False

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)
""",
    "CohereNorm": """
class CohereNorm(nn.Module):
    def __init__(self, shape, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight.to(torch.float32) * hidden_states
        return hidden_states.to(input_dtype)
""",
    "LayerScale": """
class LayerScale(nn.Module):
    def __init__(self, shape, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(torch.rand(shape))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma
""",
    "DropPath": """
class DropPath(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.drop_prob = p

    def forward(self, hidden_states):
        if self.drop_prob == 0.0 or not self.training:
            return hidden_states
        keep_prob = 1 - self.drop_prob
        shape = (hidden_states.shape[0],) + (1,) * (hidden_states.ndim - 1)
        random_tensor = torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
        random_tensor = torch.floor(random_tensor + keep_prob)
        return hidden_states.div(keep_prob) * random_tensor
""",
    "QuickGELU": """
class QuickGELU(nn.Module):
    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)
""",
    "CallsAct": """
class CallsAct(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, input):
        return self.act(input)
""",
    "Conv1D": """
class Conv1D(nn.Module):
    def __init__(self, nx, nf):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.rand(nx, nf)), nn.Parameter(torch.rand(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        x = x.view(size_out)
        return x
""",
    "FalconLinear": """
class FalconLinear(nn.Linear):
    def forward(self, input):
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias
""",
    "LayerNormFp32": """
class LayerNormFp32(nn.LayerNorm):
    def forward(self, x):
        weight = self.weight.float() if self.weight is not None else None
        bias = self.bias.float() if self.bias is not None else None
        x = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
        return x
""",
    "FastLayerNorm": """
class FastLayerNorm(nn.LayerNorm):
    def __init__(self, shape):
        super().__init__(shape)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x
""",
    "FunctionNorm": """
class FunctionNorm(nn.Module):
    def __init__(self, shape, eps=1e-6):
        super().__init__()
        self.normalized_shape, self.eps = (shape,), eps
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
""",
    "PlainNorm": """
class PlainNorm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.normalized_shape = (shape,)

    def forward(self, hidden_states):
        orig_dtype = hidden_states.dtype
        return F.layer_norm(
            hidden_states.to(dtype=torch.float32), self.normalized_shape, None, None, eps=1e-5
        ).to(orig_dtype)
""",
    "Attention": """
class Attention(nn.Module):
    def __init__(self, fused=True, dim=D, heads=2):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, dim // heads, dim
        self.scale, self.fused_attn = self.head_dim ** -0.5, fused
        self.qkv, self.proj, self.gate = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), None
        self.q_norm, self.k_norm, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        B, N, C = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=attn_mask,
                dropout_p=self.attn_drop.p if self.training else 0.0,
                is_causal=is_causal,
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn_bias = resolve_self_attn_mask(N, attn, attn_mask, is_causal)
            attn = maybe_add_mask(attn, attn_bias)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
        x = self.norm(x)
        if gate is not None:
            x = x * gate
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


def resolve_self_attn_mask(seq_len, attn, attn_mask=None, is_causal=False):
    return attn_mask


def maybe_add_mask(scores, attn_mask=None):
    return scores if attn_mask is None else scores + attn_mask
""",
    "MLP": """
class MLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(D, H), nn.Linear(H, D)
        self.act_fn = nn.GELU() if act is None else act

    def forward(self, x):
        x = self.up_proj(x)
        x = self.act_fn(x)
        return self.down_proj(x)
""",
    "GatedMLP": """
class GatedMLP(nn.Module):
    def __init__(self, act=None, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, H, bias=bias), nn.Linear(D, H, bias=bias)
        self.down_proj = nn.Linear(H, D, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    "NotedMLP": """
class NotedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj, self.n = nn.Linear(D, H), nn.Linear(H, D), 0

    def forward(self, x):
        h = self.up_proj(x)
        self.n += 1
        return self.down_proj(F.gelu(h))
""",
    "Adapter": """
class Adapter(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.disabled = base_layer, False
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, *args):
        found = self.base_layer(*args)
        return found if self.disabled else found * self.scale
""",
    "Doubled": """
class Doubled(nn.Module):
    def forward(self, x):
        return x * 2
""",
}


def with_parts(text: str, others: str = "") -> str:
    """The source with what it and others name in front of it."""
    words = set(re.findall(r"\w+", text + others))
    return "\n\n".join([PRELUDE, *(PARTS[name] for name in PARTS if name in words), text])
