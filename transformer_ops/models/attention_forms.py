"""How attention modules are written: the statements of their `forward`, and the functions that they
call."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..op.borrowed import class_of
from .pattern import Choices, Names, choices, match_groups
from .reads import value_of_name
from .rules import FuseSkip

__all__ = [
    "PARTS",
    "check_rotation_of_timm",
    "forward_of",
    "known_sdpa",
    "names_around",
    "names_of_timm",
]

PARTS = (("Q", "query"), ("K", "key"), ("V", "value"))

# ---- the forward of timm's modules


def _one_or_three(one: str, kv_heads: str, head_dim: str) -> str:
    """What timm writes for one product for queries, keys and values, or three."""
    three = "\n".join(
        f"{x} = self.any_{name}(H).reshape(B, N, self.{heads}, {head_dim}).transpose(1, 2)"
        for (x, name), heads in zip(PARTS, ("num_heads", kv_heads, kv_heads), strict=True)
    )
    heads = f"""
        X = X.reshape(B, N, 3, self.num_heads, {head_dim}).permute(2, 0, 3, 1, 4)
        Q, K, V = X.unbind(0)
        """
    branches = (textwrap.dedent(one), textwrap.dedent(heads), three)
    one, heads, three = (textwrap.indent(text, "    ") for text in branches)
    return f"if self.qkv is not None:\n{one}{heads}\nelse:\n{three}"


_ROTATION_OF_TIMM = """
if rope is not None:
    P = self.any_prefix
    R = getattr(self, "rotate_half", False)
    Q = torch.cat(
        [Q[:, :, :P, :], apply_rot_embed_cat(Q[:, :, P:, :], rope, half=R)], dim=2
    ).type_as(V)
    K = torch.cat(
        [K[:, :, :P, :], apply_rot_embed_cat(K[:, :, P:, :], rope, half=R)], dim=2
    ).type_as(V)
"""
_CALL_OF_TIMM = """
if self.fused_attn:
    H = F.scaled_dot_product_attention(
        Q, K, V, attn_mask=attn_mask,
        dropout_p=self.any_dropout_module.p if self.training else 0.0, is_causal=is_causal
    )
else:
    Q = Q * self.any_scaling
    W = Q @ K.transpose(-2, -1)
    M = resolve_self_attn_mask(N, W, attn_mask, {})
    W = maybe_add_mask(W, M)
    W = W.softmax(dim=-1)
    W = self.any_dropout_module(W)
    H = W @ V
"""
_TIMM = (
    choices("B, N, C = H.shape"),
    choices("G = self.gate(H).sigmoid() if self.gate is not None else None"),
    choices(
        """
        X = self.qkv(H).reshape(B, N, 3, self.num_heads, self.any_head_dim).permute(2, 0, 3, 1, 4)
        Q, K, V = X.unbind(0)
        """,
        _one_or_three("X = self.qkv(H)", "any_num_kv_heads", "self.any_head_dim"),
        # EVA-02: biases that are no parameters of the products.
        _one_or_three(
            """
            if self.any_query_bias is None:
                X = self.qkv(H)
            else:
                Y = torch.cat((self.any_query_bias, self.any_key_bias, self.any_value_bias))
                if self.qkv_bias_separate:
                    X = self.qkv(H)
                    X += Y
                else:
                    X = F.linear(H, weight=self.qkv.weight, bias=Y)
            """,
            "num_heads",
            "-1",
        ),
    ),
    choices("Q, K = self.q_norm(Q), self.k_norm(K)"),
    choices(_ROTATION_OF_TIMM, ""),
    choices(
        """
        if self.any_groups > 1:
            K = K.repeat_interleave(self.any_groups, dim=1)
            V = V.repeat_interleave(self.any_groups, dim=1)
        """,
        "",
    ),
    choices(*(_CALL_OF_TIMM.format(flag) for flag in ("is_causal", "is_causal=is_causal"))),
    choices(
        "H = H.transpose(1, 2).reshape(B, N, self.attn_dim)",
        "H = H.transpose(1, 2).reshape(B, N, C)",
    ),
    choices(
        """
        H = self.norm(H)
        if G is not None:
            H = H * G
        H = self.proj(H)
        H = self.proj_drop(H)
        return H
        """
    ),
)


def _with_each_cache(*texts: str) -> tuple[str, ...]:
    """The texts for both names of the cache: that before transformers 5.24, and that since then."""
    update, newer = "self.layer_idx)", "self.layer_idx, kwargs=kwargs)"
    since = (text.replace("past_key_values", "cache").replace(update, newer) for text in texts)
    return (*texts, *since)


# BERT: the sum with the input, and its norm, in a module around it.
_AROUND: tuple[Choices, ...] = (
    choices(
        "attention_mask = attention_mask if not self.is_cross_attention else encoder_attention_mask"
    ),
    choices(
        *_with_each_cache(
            """
            O, W = self.any_attention(
                H, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask,
                past_key_values=past_key_values, **kwargs
            )
            """
        )
    ),
    choices("O = self.any_output(O, H)\nreturn O, W"),
)

# ---- the functions that they call

# timm's, whose tables are next to each other.
_APPLY_OF_TIMM = choices("S, C = E.chunk(2, -1)\nreturn apply_rot_embed(X, S, C, half=Z)")
_APPLY_PARTS_OF_TIMM = choices(
    """
    if Z:
        Y = X * C + rope_rotate_half(X) * S
    else:
        Y = X * C + rot(X) * S
    return Y.to(dtype=X.dtype)
    """
)
_NEIGHBORS_OF_TIMM = choices(
    "return torch.stack([-X[..., 1::2], X[..., ::2]], -1).reshape(X.shape)"
)
_HALVES_OF_TIMM = choices("A, B = X.chunk(2, dim=-1)\nreturn torch.cat([-B, A], dim=-1)")
# Repeats the heads of keys and values.
_REPEAT = (
    choices("B, C, T, Z = H.shape"),
    choices("if N == 1:\n    return H"),
    choices("H = H[:, :, None, :, :].expand(B, C, N, T, Z)"),
    choices("return H.reshape(B, C * N, T, Z)"),
)
# All that the function which transformers registers as "sdpa" takes.
_OF_SDPA = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "dropout",
    "scaling",
    "is_causal",
    "position_bias",
    "cache",
    "kwargs",
}

# ---- looking for it


def forward_of(module: nn.Module) -> Any:
    """The function of a module's `forward`, without the decorator of transformers that renames an
    argument. Another decorator stays around it."""
    found: Any = class_of(module).forward
    deprecation = sys.modules.get("transformers.utils.deprecation")
    rename = getattr(deprecation, "deprecate_kwarg", None)
    if rename is None or not hasattr(found, "__wrapped__"):
        return found
    # All that it returns have the same code.
    code = rename("old", version="0", new_name="new")(lambda new: new).__code__
    return found.__wrapped__ if getattr(found, "__code__", None) is code else found


def names_of_timm(module: nn.Module) -> Names | None:
    """The parts of an attention module of timm; None of another one."""
    return match_groups(class_of(module).forward, _TIMM)


def names_around(module: nn.Module) -> Names | None:
    """The parts of a module that adds its input to what attention gives; None of another one."""
    return match_groups(forward_of(module), _AROUND)


def check_rotation_of_timm(known: Mapping[str, Any]) -> None:
    """FuseSkip if the function of a module rotates in a way that is not known."""
    whole = known.get("apply_rot_embed_cat")
    others = getattr(whole, "__globals__", {})
    wanted: tuple[tuple[Any, Choices], ...] = (
        (whole, _APPLY_OF_TIMM),
        (others.get("apply_rot_embed"), _APPLY_PARTS_OF_TIMM),
        (others.get("rot"), _NEIGHBORS_OF_TIMM),
        (others.get("rope_rotate_half"), _HALVES_OF_TIMM),
    )
    if any(match_groups(function, (form,)) is None for function, form in wanted):
        raise FuseSkip("its rotation of queries and keys is not known")


def known_sdpa(interface: Any) -> Any:
    """The function that transformers registers as "sdpa"; None if it is another one."""
    function = interface["sdpa"]
    own = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if own != ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"):
        return None
    is_known = set(inspect.signature(function).parameters) <= _OF_SDPA and _repeats(function)
    return function if is_known else None


def _repeats(function: Any) -> bool:
    """Whether a function repeats heads in the way that is known, or not at all."""
    if "repeat_kv" not in function.__code__.co_names:
        return True
    return match_groups(value_of_name(function, "repeat_kv"), _REPEAT) is not None
