"""Layers as model libraries write them, for tests of `fuse`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import transformer_ops as tops


class RootNorm(nn.Module):
    """The RMSNorm of transformers."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GatedMLP(nn.Module):
    """The MLP of Llama."""

    def __init__(self, size: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """The MLP of a vision encoder."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.activation_fn: nn.Module = nn.GELU(approximate="tanh")
        self.fc1 = nn.Linear(size, inner)
        self.fc2 = nn.Linear(inner, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class Mixer(nn.Module):
    """A module in the place of attention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.proj(x).cumsum(-2), None


class DecoderLayer(nn.Module):
    """A decoder layer of transformers."""

    def __init__(self, size: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.self_attn = Mixer(size)
        self.mlp: nn.Module = GatedMLP(size, inner)
        self.input_layernorm = RootNorm(size)
        self.post_attention_layernorm: nn.Module = RootNorm(size)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states)
        hidden_states = residual + hidden_states * scale

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class EncoderLayer(nn.Module):
    """A layer with layer norms, a plain MLP, and dropout after it."""

    def __init__(self, size: int = 16, inner: int = 24, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.mlp = PlainMLP(size, inner)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm(x)
        x = self.mlp(x)
        x = shortcut + self.drop(x)
        return x


class SandwichLayer(nn.Module):
    """A layer with norms before and after each part, as in Gemma 3."""

    def __init__(self, size: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.pre, self.post = RootNorm(size), RootNorm(size)
        self.mlp = GatedMLP(size, inner, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.pre(x)
        x = self.mlp(x)
        x = self.post(x)
        x = residual + x
        return x


class PostNormLayer(nn.Module):
    """A layer with a norm only after the MLP, as in OLMo 2, in a function with a closure."""

    def __init__(self, size: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.norm = RootNorm(size)
        self.mlp = GatedMLP(size, inner)

    def extra(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x * super().__getattribute__("extra")()  # `super()` needs the cell of the class
        residual = x
        x = self.mlp(x)
        x = self.norm(x)
        x = x + residual
        return x


LAYERS = {
    "decoder": DecoderLayer,
    "encoder": EncoderLayer,
    "sandwich": SandwichLayer,
    "post-norm": PostNormLayer,
}


class Model(nn.Module):
    """A stack of layers with tied embeddings."""

    def __init__(self, kind: str = "decoder", layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(LAYERS[kind]() for _ in range(layers))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def fused_rules(report: Any) -> dict[str, int]:
    """The number of parts of each rule of `fuse`, except for one that only some processors have,
    and for that of heads, which test_head_and_loss.py tests."""
    others = ("product", "head and loss")
    rules = [row.rule for row in report.fused if row.rule not in others]
    return {rule: rules.count(rule) for rule in sorted(set(rules))}


# ---- a plain model and a fused one


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of all parameters that have some."""
    model.zero_grad()
    y = (model if run is None else run)(tokens())
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def pair(kind: str = "decoder") -> tuple[Model, Model, tops.FuseReport]:
    plain, model = Model(kind), Model(kind)
    report = tops.fuse(model)
    return plain, model, report


def assert_same(plain: nn.Module, model: nn.Module, run: Any = None) -> None:
    torch.testing.assert_close(results(plain), results(model, run), rtol=1e-4, atol=1e-4)


def of_layers(rows: list[Any]) -> list[Any]:
    return sorted(row for row in rows if row.kind in {kind.__name__ for kind in LAYERS.values()})


def is_fused(report: tops.FuseReport) -> list[bool]:
    return [not row.reason for row in of_layers(report.rows)]


# ---- models of transformers

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | options))


def step_of(model: Any, given: dict[str, Any], run: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of all parameters that have some."""
    model.zero_grad()
    found = (model if run is None else run)(**given)
    loss = found.loss if "labels" in given else found.last_hidden_state.square().mean()
    if loss.requires_grad:
        loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same_step(
    plain: Any,
    model: Any,
    given: dict[str, Any],
    tolerance: float = 1e-5,
    run: Any = None,
    least: float | None = None,
) -> None:
    """Gradients may differ by `tolerance` of their norms, and by `least`: some are zero but for
    rounding. By default, that is `tolerance` of the largest norm."""
    found = []
    for one, called in ((plain, None), (model, run)):
        torch.manual_seed(2)  # Phi-MoE draws experts
        found.append(step_of(one, given, called))
    (loss, grads), (own_loss, own) = found
    torch.testing.assert_close(own_loss, loss)
    # Compiled code gives zeros to parameters that it does not use.
    more = own.keys() - grads.keys() if run is not None else set()
    assert own.keys() - more == grads.keys() and not any(own[name].any() for name in more)
    if least is None:
        least = tolerance * max(float(grad.norm()) for grad in grads.values())
    for name, grad in grads.items():
        assert (own[name] - grad).norm() <= tolerance * grad.norm() + least, name
