"""The references of ops in plain PyTorch, and the ops' extra inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def reference(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activation(a) * b

    return reference


def interleaved(size: int, reference: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Applies the reference for halves to blocks of `size` that alternate."""

    def halves_first(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 2, size))
        return reference(
            torch.cat((blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)), -1)
        )

    return halves_first


def situ(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    # torch.clamp is not used, because its gradient at the limit depends on torch's version.
    gate = torch.where(a > limit, limit, a)
    linear = torch.where(b.abs() > limit, limit * b.sign(), b)
    return gate * torch.sigmoid(alpha * gate) * (linear + offset)


def layer_norm(eps: float = 1e-5, zero_centered: bool = False) -> Callable[..., Tensor]:
    def reference(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)

    return reference


def rms_norm(eps: float = 1e-5, zero_centered: bool = False) -> Callable[..., Tensor]:
    def reference(x: Tensor, *, weight: Tensor) -> Tensor:
        dims = tuple(range(-weight.dim(), 0))
        scale = weight + 1 if zero_centered else weight
        return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps) * scale

    return reference


def qk_norm(
    heads: int, kv_heads: int, eps: float = 1e-5, zero_centered: bool = False
) -> Callable[..., Tensor]:
    def reference(x: Tensor, *, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        widths = [heads * len(q_weight), kv_heads * len(k_weight)]
        q, k, rest = x.split([*widths, x.shape[-1] - sum(widths)], -1)
        norm = rms_norm(eps, zero_centered)
        q = norm(q.unflatten(-1, (heads, -1)), weight=q_weight).flatten(-2)
        k = norm(k.unflatten(-1, (kv_heads, -1)), weight=k_weight).flatten(-2)
        return torch.cat([q, k, rest], -1)

    return reference


def angles(x: Tensor, width: int) -> list[Tensor]:
    """Tables of cosines and sines, which are no rotation, for the rows of the last dimension."""
    table = torch.arange(x.shape[-2] * width, dtype=torch.float32).reshape(-1, width)
    return [torch.cos(table).to(x), torch.sin(table * 1.3).to(x)]


def rope(
    heads: int, rotary_dim: int | None = None, interleaved: bool = False
) -> Callable[..., Tensor]:
    """As transformers computes it, by whole tables."""

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = rotary_dim or cos.shape[-1]
        head_dim = 4 if rotary_dim is None else x.shape[-1] // heads
        if cos.shape[-1] != width:
            cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
        head = x[..., : heads * head_dim].unflatten(-1, (heads, head_dim))
        part, rest = head[..., :width], head[..., width:]
        part = part * cos.unsqueeze(-2) + turned(part) * sin.unsqueeze(-2)
        whole = torch.cat([part, rest], -1).flatten(-2)
        return torch.cat([whole, x[..., heads * head_dim :]], -1)

    return reference


def by_head(
    heads: int, reference: Callable[..., Tensor], is_back: bool = False
) -> Callable[..., Tensor]:
    """For rows with the query, the key and the value of each head next to each other; `is_back`:
    the result is such rows, too."""

    def found(x: Tensor, *others: Tensor) -> Tensor:
        rows = x.unflatten(-1, (heads, 3, -1)).transpose(-2, -3).flatten(-3)
        y = reference(rows, *others)
        if is_back:
            y = y.unflatten(-1, (3, heads, -1)).transpose(-2, -3).flatten(-3)
        return y

    return found


def attention(
    heads: int,
    kv_heads: int,
    causal: bool = False,
    scale: float | None = None,
    factors: Tensor | None = None,
) -> Callable[..., Tensor]:
    """Step by step; `factors` multiply the probabilities."""

    def reference(x: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        head_dim = x.shape[-1] // (heads + 2 * kv_heads)
        widths = [count * head_dim for count in (heads, kv_heads, kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, head_dim)).transpose(-2, -3) for part in x.split(widths, -1)
        )
        k, v = (t.repeat_interleave(heads // kv_heads, -3) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if sinks is not None:
            sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
            p = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            # A row that reads nothing gives zeros.
            is_empty = (scores == -torch.inf).all(-1, keepdim=True)
            p = torch.softmax(scores.masked_fill(is_empty, 0), -1).masked_fill(is_empty, 0)
        p = p if factors is None else p * factors
        return (p @ v).transpose(-2, -3).flatten(-2)

    return reference


def l2_normalization(eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def gather(x: Tensor) -> Tensor:
    """A gather over two ranks; the other rank has zeros."""
    return torch.cat((x, torch.zeros_like(x)))


def scatter(x: Tensor) -> Tensor:
    return x.chunk(2)[0]


def split(mode: str, sequence: bool) -> Callable[..., Tensor]:
    """A Linear of which this rank has a shard."""

    def reference(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(gather(x) if mode == "column" and sequence else x, weight, bias)
        return scatter(y) if mode == "row" and sequence else y

    return reference


# Rows in three groups, one of which is empty; a sixth of the rows are in no group.
GROUPS = 3


def used_rows(rows: int) -> list[int]:
    used = rows - rows // 6
    return [used // 3, 0, used - used // 3]


def splits_for(x: Tensor) -> Tensor:
    return torch.tensor(used_rows(x.shape[:-1].numel()), device=x.device)


def targets_for(x: Tensor, classes: int) -> Tensor:
    """A class for each row; some of the rows are ignored."""
    numbers = torch.arange(x.shape[:-1].numel(), device=x.device).reshape(x.shape[:-1])
    return torch.where(numbers % 5 == 3, -100, numbers * 7 % classes)


def linear_cross_entropy(
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    **unused: object,
) -> Callable[..., Tensor]:
    def reference(
        x: Tensor, target: Tensor, *, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        z = F.linear(x, weight, bias)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        z, flat = z.reshape(-1, z.shape[-1]), target.reshape(-1)
        loss = F.cross_entropy(z, flat, reduction="none", label_smoothing=label_smoothing)
        loss = loss + z_loss * torch.where(flat == -100, 0, torch.logsumexp(z, -1).square())
        if reduction == "none":
            return loss.reshape(target.shape)
        return loss.sum() / ((flat != -100).sum() if reduction == "mean" else 1)

    return reference


def row_numbers(x: Tensor) -> Tensor:
    """A number for each row, near 1."""
    return 1 + 0.1 * torch.randn(x.shape[:-1]).to(x)


def grouped_linear(
    x: Tensor, splits: Tensor, scales: Tensor | None = None, **parameters: Tensor
) -> Tensor:
    weight, bias = (
        parameters.get(name, [parameters.get(f"{name}{i}") for i in range(GROUPS)])
        for name in ("weight", "bias")
    )
    rows, done = x.reshape(-1, x.shape[-1]), 0
    found = []
    for group, size in enumerate(splits.tolist()):
        y = rows[done : done + size] @ weight[group].T
        if bias[group] is not None:
            scale = 1 if scales is None else scales.flatten()[done : done + size, None]
            y = y + scale * bias[group]
        found.append(y)
        done += size
    found.append(torch.zeros(len(rows) - done, found[0].shape[-1]).to(x))
    return torch.cat(found).reshape(*x.shape[:-1], found[0].shape[-1])


def packed_linear(x: Tensor, **parameters: Tensor) -> Tensor:
    weight, bias = (
        [tensor for name, tensor in parameters.items() if name.startswith(prefix)]
        for prefix in ("weight", "bias")
    )
    return F.linear(x, torch.cat(weight), torch.cat(bias) if bias else None)


def lora_linear(adapted: Sequence[int], scaling: Sequence[float]) -> Callable[..., Tensor]:
    def compute(x: Tensor, **parameters: Tensor) -> Tensor:
        weights = (tensor for name, tensor in parameters.items() if name.startswith("weight"))
        found = [F.linear(x, w, parameters.get(f"bias{i}")) for i, w in enumerate(weights)]
        for k, (i, scale) in enumerate(zip(adapted, scaling, strict=True)):
            hidden = x.to(parameters[f"lora_a{k}"].dtype) @ parameters[f"lora_a{k}"].T
            found[i] = (found[i] + scale * hidden @ parameters[f"lora_b{k}"].T).to(x.dtype)
        return torch.cat(found, -1)

    return compute


def scaled(reference: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, scales: reference(x) * scales.unsqueeze(-1)


COPIES = 2  # of each token


def ids_for(x: Tensor) -> Tensor:
    """Ids of GROUPS experts, one of which gets no tokens; some copies are dropped."""
    tokens = x.shape[:-1]
    ids = torch.arange(tokens.numel() * COPIES).reshape(*tokens, COPIES)
    return torch.tensor([0, 2, 2, -1, 0], device=x.device)[(ids % 5).to(x.device)]


def places_of(ids: Tensor) -> Tensor:
    """The positions of the copies, computed with Python's own sort."""
    flat = ids.flatten().tolist()
    order = sorted((i for i in range(len(flat)) if flat[i] >= 0), key=lambda i: flat[i])
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    for place, i in enumerate(order):
        places[i] = place
    return places.reshape(ids.shape).to(ids.device)


def dispatch(
    x: Tensor, ids: Tensor, probs: Tensor, groups: range = range(GROUPS)
) -> tuple[Tensor, ...]:
    ids = torch.where((ids >= groups.start) & (ids < groups.stop), ids, -1)
    places, rows = places_of(ids), x.reshape(-1, x.shape[-1])
    kept = places.flatten() >= 0
    at = (places.flatten()[kept].long(),)
    row = torch.arange(ids.numel(), device=x.device)[kept] // ids.shape[-1]
    output = rows.new_zeros(ids.numel(), x.shape[-1]).index_put(at, rows[row])
    permuted = probs.new_zeros(ids.numel()).index_put(at, probs.flatten()[kept])
    splits = torch.tensor([int((ids == group).sum()) for group in groups]).to(ids)
    return output, splits, permuted, places


def places_for(x: Tensor) -> Tensor:
    """Positions of tokens with one copy each, for which the copies are the rows of `x`."""
    ids = torch.tensor([0, 2, 2, -1, 0])[torch.arange(len(x)) % 5]
    return places_of(ids.unsqueeze(-1)).to(x.device)


def combine(x: Tensor, positions: Tensor) -> Tensor:
    found = torch.cat([x, torch.zeros(1, x.shape[-1]).to(x)])
    return found[positions.long()].sum(-2)
