"""Rules for feed-forwards and the sums around them.

In: the names in statements such as `x = x + self.down(self.act(self.up(self.norm(x))))`. Out: the
ops of the steps between a MakeExtraOutput and an AddExtraInput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..op.borrowed import class_of
from ..ops.add_extra_input import AddExtraInput
from ..ops.attention import Attention
from ..ops.drop_path import DropPath
from ..ops.make_extra_output import MakeExtraOutput
from ..ops.norm import LayerNorm, RMSNorm
from .attention import find_attention
from .attention_forms import names_around
from .attention_ops import attention_in
from .parts import count_products, ops_of, part, register_method
from .pattern import Names, Pattern, arguments_in, register_call
from .rules import FuseSkip, FuseUnfit, register_fuse_rule
from .whole import unknown, whole

_CHANNEL = "residual"
# The method of BERT's layers that has their feed-forward.
_METHOD = "feed_forward_chunk"


def _begin(channel: str = _CHANNEL) -> nn.Module:
    return MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False)


def _end(channel: str = _CHANNEL) -> nn.Module:
    return AddExtraInput().set_extra_input_channel(0, channel)


def _steps(
    module: Any, names: Names, name: str, products: int = 0, may_pair: bool = False
) -> Sequence[nn.Module]:
    """The ops of steps with at least so many products. They may be written for the rows of a
    tensor, while ops take it as it is. Only steps that `may_pair` may end in all results of an
    attention module."""
    on_rows = f"{name}_on_rows" in names
    if on_rows:
        name += "_on_rows"
    elif name not in names:
        return []
    steps: Any = names[name]
    try:
        found = ops_of(module, steps)
    except FuseSkip as skip:
        called = (getattr(module, attribute, None) for attribute in steps.attributes)
        if sum(isinstance(part, nn.Linear) for part in called) < products:
            raise FuseUnfit(str(skip)) from None
        raise
    given, attention = arguments_in({name: names[name]}), attention_in(found)
    is_pair = given is not None and not given.is_first
    is_pair &= attention is not None and attention.call.gives_pair
    if is_pair and not (may_pair and given in steps.list[-1][1].values()):
        raise FuseUnfit(f"all results of attention are taken in {steps}")
    if count_products(found) < products:
        raise FuseUnfit(f"{steps} has fewer than {products} products")
    if on_rows and not all(map(_computes_rows_alone, found)):
        raise FuseSkip(f"{steps} of rows is not what ops of the whole tensor compute")
    return found


def _computes_rows_alone(op: nn.Module) -> bool:
    """Whether a row of the result depends on one row, however many dimensions a tensor has."""
    if isinstance(op, LayerNorm | RMSNorm):
        return len(op.normalized_shape) == 1
    return not isinstance(op, Attention | DropPath)


# ---- without a sum


def _feed_forward(module: Any, names: Names) -> Sequence[nn.Module]:
    steps: Any = names["steps"]
    if arguments_in(names) is not None:
        raise FuseUnfit("attention is among its steps")
    if _METHOD in steps:
        raise FuseUnfit(f"{_METHOD} has a rule of its own")
    if len(steps.list) == 1 and "part" in steps.list[0][1]:
        raise FuseUnfit(f"what {steps} calls is a module of its own")
    return _steps(module, names, "steps", products=2)


def _has_chunks(names: Names, name: str) -> bool:
    steps: Any = names[name]
    return any("chunk" in own for _, own in steps.list)


def _attention_alone(module: Any, names: Names) -> Sequence[nn.Module]:
    if arguments_in(names) is None:
        raise FuseUnfit("no attention is among its steps")
    if _has_chunks(names, "steps"):
        raise FuseUnfit("its steps are a layer")
    return _steps(module, names, "steps", products=2, may_pair=True)


register_fuse_rule("attention", "H = any_steps(H)", _attention_alone)
register_fuse_rule("feed-forward", "H = any_steps(H)", _feed_forward)
register_fuse_rule("feed-forward in chunks", "H = any_steps(H)", _feed_forward, method="ff_chunk")


# ---- the sum with another tensor: a projection of attention, a block with parallel branches


def _sum(module: Any, names: Names) -> Sequence[nn.Module]:
    after = _steps(module, names, "after")
    return [*_steps(module, names, "steps", products=1), AddExtraInput(), *after]


register_fuse_rule("sum", "H = X + any_steps(H)", _sum)
register_fuse_rule("sum and norm", "H = any_after(X + any_steps(H))", _sum)


def _parallel(module: Any, names: Names) -> Sequence[nn.Module]:
    steps = _steps(module, names, "steps", products=1)
    return [_begin(), *steps, AddExtraInput(), _end()]


def _parallel_from_norm(module: Any, names: Names) -> Sequence[nn.Module]:
    return [*_steps(module, names, "steps", products=1), AddExtraInput(), AddExtraInput()]


register_fuse_rule("parallel branches", "H = X + H + any_steps(H)", _parallel)
# Both branches take the norm of the input.
register_fuse_rule("parallel branches of a norm", "H = X + Y + any_steps(H)", _parallel_from_norm)


# ---- the sum with the input


def _residual(module: Any, names: Names) -> Sequence[nn.Module]:
    return [_begin(), *_steps(module, names, "steps"), _end()]


def _residual_and_norm(module: Any, names: Names) -> Sequence[nn.Module]:
    after = _steps(module, names, "after")
    if not after:
        raise FuseUnfit("nothing is behind the sum")
    return [*_residual(module, names), *after]


# On all rows at once, as OPT writes it, or on the tensor as it is.
_ROWS = """
Y = H.reshape(-1, H.size(-1))
Y = (Y + any_steps_on_rows(Y)).view(H.shape)
H = {}
"""
register_fuse_rule("residual", ("H = H + any_steps(H)", _ROWS.format("Y")), _residual)
register_fuse_rule(
    "residual and norm",
    ("H = any_after(H + any_steps(H))", _ROWS.format("any_after(Y)")),
    _residual_and_norm,
)


# ---- two sums with the input, one after the other: a whole layer


def _layer(module: Any, names: Names) -> Sequence[nn.Module]:
    if "both" in names:
        if arguments_in(names) is None or not _has_chunks(names, "both"):
            raise FuseUnfit(f"{names['both']} is no layer")
        return _steps(module, names, "both", products=4)
    first, second = (_steps(module, names, name, products=1) for name in ("first", "second"))
    between, after = (_steps(module, names, name) for name in ("between", "after"))
    attention = "input of attention"
    halves = [_begin(attention), *first, _end(attention), *between], [_begin(), *second, _end()]
    return [*halves[0], *halves[1], *after]


register_fuse_rule(
    "layer",
    (
        """
        Y = H + any_first(H)
        H = Y + any_second(Y)
        """,
        # Norms behind the sums.
        """
        Y = any_between(H + any_first(H))
        H = any_after(Y + any_second(Y))
        """,
        # BERT, whose sums are in other modules.
        "H = any_both(H)",
        # OPT, with norms before or behind.
        """
        Y = any_between(H + any_first(H))
        X = Y.reshape(-1, Y.size(-1))
        H = any_after((X + any_second_on_rows(X)).view(Y.shape))
        """,
    ),
    _layer,
)


# ---- the sum in another module (BERT)

_OF_METHOD = Pattern("return self.any_output(self.any_intermediate(H), H)")
_SUM_AND_NORM = Pattern("return any_after(X + any_steps(H))")


def _feed_forward_and_norm(module: Any, names: Names) -> Sequence[nn.Module]:
    output = getattr(module, names["output"])
    inner = whole(output, _SUM_AND_NORM)
    return [
        _begin(),
        *part(getattr(module, names["intermediate"])),
        *_steps(output, inner, "steps"),
        _end(),
        *_steps(output, inner, "after"),
    ]


def _attention(module: Any, names: Names) -> Sequence[nn.Module]:
    """Attention, or attention and the sum around it."""
    found = getattr(module, names["part"], None)
    if not isinstance(found, nn.Module):
        raise FuseUnfit(f"{names['part']} is no module")
    around = names_around(found)
    if around is None:
        call = find_attention(found)
        if getattr(names.get("arguments"), "is_first", False) and not call.gives_pair:
            raise FuseUnfit(f"a part of what {names['part']} gives is taken")
        return call.ops(found)
    if found.is_cross_attention:
        raise FuseSkip("it attends to another sequence")
    inside, output = (getattr(found, around[name]) for name in ("attention", "output"))
    inner = whole(output, _SUM_AND_NORM)
    attention = "input of attention"
    return [
        _begin(attention),
        *find_attention(inside, found).ops(inside),
        *_steps(output, inner, "steps"),
        _end(attention),
        *_steps(output, inner, "after"),
    ]


def _chunk(module: Any) -> list[Any]:
    names = _OF_METHOD.match_all(getattr(class_of(module), _METHOD))
    if names is None:
        raise unknown(module)
    return list(_feed_forward_and_norm(module, names))


register_call(_attention)
register_method(_METHOD, _chunk)
register_fuse_rule(
    "feed-forward, sum and norm",
    "H = self.any_output(self.any_intermediate(H), H)",
    _feed_forward_and_norm,
    method=_METHOD,
)
