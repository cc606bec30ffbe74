"""`tops.fuse(model, recompute=...)`: the policy of the ops in a fused model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fuse_models import Model, assert_same, pair, results, tokens

import transformer_ops as tops


def policies(model: torch.nn.Module) -> set[str]:
    """The policies of all ops that have run."""
    found: set[str] = set()
    for module in model.modules():
        for region in module.fused.regions if hasattr(module, "fused") else ():
            if region.sequential is not None:
                found.add(region.sequential.recompute)
    return found


def saved(model: Model, recompute: str) -> int:
    return tops.fuse(model, recompute=recompute).saved_bytes(tokens())[1]


def test_it_saves_less_and_computes_the_same() -> None:
    plain, model, _ = pair()
    cheap = saved(model, "cheap")
    products = saved(model, "products")
    assert_same(plain, model)
    assert policies(model) == {"products"}
    assert products < cheap < saved(model, "none")


def test_another_call_sets_it_for_selected_modules() -> None:
    _, model, _ = pair()
    tops.fuse(model, only="layers.1*", recompute="products")
    results(model)
    assert policies(model.layers[0]) == {"cheap"}
    assert policies(model.layers[1]) == {"products"}
    tops.fuse(model)
    results(model)
    assert policies(model) == {"cheap"}


def test_compiled_code_follows() -> None:
    plain, model, _ = pair()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(plain, model, compiled)
    tops.fuse(model, recompute="products")
    assert_same(plain, model, compiled)
    assert policies(model) == {"products"}


def test_copies_keep_it_and_unfuse_forgets_it() -> None:
    _, model, _ = pair()
    tops.fuse(model, recompute="products")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        results(other)
        assert policies(other) == {"products"}
    keys = set(model.state_dict())
    tops.unfuse(model)
    assert not any("_tops" in name for module in model.modules() for name in vars(module))
    assert set(model.state_dict()) == keys
    tops.fuse(model)
    results(model)
    assert policies(model) == {"cheap"}


@pytest.mark.parametrize("value", ["all", None, 1])
def test_bad_values(value: object) -> None:
    model = Model("decoder")
    message = r'\[fuse\] recompute must be "none", "cheap" or "products", got '
    with pytest.raises(ValueError, match=message):
        tops.fuse(model, recompute=value)  # type: ignore[arg-type]
    assert not any(hasattr(module, "fused") for module in model.modules())
