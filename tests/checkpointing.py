"""Kinds of activation checkpointing, as scripts use them. Each calls the blocks of a model in turn:
`way(blocks, x, region)`, where the optional `region()` surrounds each block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from transformer_ops.quantization import checkpoint_contexts

Run = Callable[..., Any]


def within(region: Callable[[], Any] | None, run: Run) -> Run:
    """The call within a region of its own."""
    if region is None:
        return run

    def surrounded(*arguments: Any) -> Any:
        with region():
            return run(*arguments)

    return surrounded


def plain(blocks: nn.Sequential, x: Tensor, region: Any) -> Tensor:
    for block in blocks:
        x = within(region, block)(x)
    return x


def checkpointed(**options: Any) -> Run:
    def way(blocks: nn.Sequential, x: Tensor, region: Any) -> Tensor:
        for block in blocks:
            x = checkpoint(within(region, block), x, **options)
        return x

    return way


def sequential(blocks: nn.Sequential, x: Tensor, region: Any) -> Tensor:
    functions = [within(region, block) for block in blocks]
    found: Tensor = checkpoint_sequential(functions, 2, x, use_reentrant=False)
    return found


def nested(blocks: nn.Sequential, x: Tensor, region: Any) -> Tensor:
    inner = checkpointed(use_reentrant=False)
    found: Tensor = checkpoint(inner, blocks, x, region, use_reentrant=False)
    return found


def selective() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = "linear" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


WAYS: dict[str, Run] = {
    "reentrant": checkpointed(use_reentrant=True),
    "non-reentrant": checkpointed(use_reentrant=False),
    "contexts": checkpointed(use_reentrant=False, context_fn=checkpoint_contexts),
    "selective": checkpointed(use_reentrant=False, context_fn=selective),
    "both contexts": checkpointed(
        use_reentrant=False, context_fn=functools.partial(checkpoint_contexts, selective)
    ),
    "sequential": sequential,
    "nested": nested,
}
