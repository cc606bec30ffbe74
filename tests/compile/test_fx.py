"""`torch.fx.symbolic_trace` takes a Sequential, or an op, for one node."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import transformer_ops as tops


class Doubled(tops.BasicOperation):
    """A Python op."""

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return input_ * 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return grad_output * 2, ()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.mlp = tops.Residual(tops.RMSNorm(8), tops.Linear(8, 32), nn.Tanh(), tops.Linear(32, 8))
        self.ops = nn.Sequential(tops.Linear(8, 8), Doubled(), tops.view(nn.GELU()))
        self.add = tops.AddExtraInput()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp(self.first(x)).relu()
        return self.add(self.ops(hidden), x)


NODES = ["x", "first", "mlp", "relu", "ops.0", "ops.1", "ops.2", "add", "output"]


def names(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes]


@pytest.mark.parametrize("called", [False, True])
def test_each_is_one_node(called: bool) -> None:
    model, x = Model(), torch.randn(3, 8)
    if called:
        model(x)
    traced = fx.symbolic_trace(model)
    assert names(traced.graph) == NODES
    for module in (traced, copy.deepcopy(traced)):
        torch.testing.assert_close(module(x), model(x))
    # The trace has left nothing behind.
    traced(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert traced.mlp is model.mlp and len(model.mlp.plans()) == 2


def test_keyword_arguments_stay() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = tops.Sequential(Doubled(), tops.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x, op_kwargs={0: {"factor": 2}})

    (node,) = (n for n in fx.symbolic_trace(Called()).graph.nodes if n.op == "call_module")
    assert node.kwargs == {"op_kwargs": {0: {"factor": 2}}}


class NodeNames(fx.Tracer):
    """As the feature extraction of torchvision, which timm uses: it looks into what is no leaf, and
    names nodes by the module in which they are made."""

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        return forward(*args, **kwargs)


def test_feature_extraction() -> None:
    model, x = Model(), torch.randn(3, 8)
    graph = NodeNames().trace(model)
    wanted = {str(node.target): node for node in graph.nodes if node.target in ("mlp", "ops.0")}
    (output,) = (node for node in graph.nodes if node.op == "output")
    graph.erase_node(output)
    graph.output(wanted)
    module = fx.GraphModule(model, graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    found = module(x)
    hidden = model.mlp(model.first(x))
    torch.testing.assert_close(found, {"mlp": hidden, "ops.0": model.ops[0](hidden.relu())})


@pytest.mark.parametrize(
    "make", [lambda: tops.Sequential(tops.GELU()), tops.GELU, lambda: tops.Residual(tops.GELU())]
)
def test_the_module_itself_has_no_inside(make: Any) -> None:
    module = make()
    with pytest.raises(TypeError, match=r"^\[\w+\] module to trace must be one that holds the \w+"):
        fx.symbolic_trace(module)
    x = torch.randn(3)
    torch.testing.assert_close(fx.symbolic_trace(nn.Sequential(module))(x), module(x))
