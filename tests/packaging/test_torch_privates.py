"""Canaries: each private thing of torch that this project uses, by name.

What is private may go with any release. A row that fails says which use to change; a use without a
row fails too. What C++ uses without a row here is declared in torch's headers: without it the
library does not compile.
"""

from __future__ import annotations

import ctypes
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch._functorch.pyfunctorch
import torch.distributed as dist
import torch.utils._device
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

PACKAGE = Path(__file__).parents[2] / "transformer_ops"


def exported(symbol: str) -> bool:
    """Whether torch's CPU library exports the symbol."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return hasattr(ctypes.CDLL(str(library)), symbol)


def has_attribute(path: str) -> bool:
    found: object = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
        if found is None:
            return False
    return True


# What Python code names; each must be there.
NAMES = [
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._DisableTorchDispatch",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._get_function_stack_at",
    "torch._C._get_tracing_state",
    "torch._C._is_torch_function_enabled",
    "torch._C._len_torch_function_stack",
    "torch._C._set_tracing_state",
    "torch._C.parse_schema",
    "torch._disable_dynamo",
    "torch._dynamo",
    "torch._dynamo.config.patch",
    "torch._functorch.pyfunctorch",
    "torch._subclasses.FakeTensor",
    "torch.amp.autocast_mode._cast",  # in a pattern: the norm of Nemotron calls it
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.fx._symbolic_trace",
    "torch.utils._device",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
]
MODULE_DICTS = [
    "_backward_hooks",
    "_backward_pre_hooks",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_modules",
    "_non_persistent_buffers_set",
    "_parameters",
]
MODULE_METHODS = ["_get_name", "_load_from_state_dict", "_replicate_for_data_parallel"]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has(name: str) -> None:
    assert has_attribute(name), f"torch {torch.__version__} lacks {name}"


@pytest.mark.parametrize("name", MODULE_DICTS)
def test_a_module_keeps(name: str) -> None:
    assert name in nn.Linear(1, 1).__dict__, f"nn.Module of torch {torch.__version__} lacks {name}"


@pytest.mark.parametrize("name", MODULE_METHODS)
def test_a_module_has(name: str) -> None:
    assert callable(getattr(nn.Module, name, None)), (
        f"nn.Module of torch {torch.__version__} lacks {name}"
    )


def test_a_module_loads_by_this_signature() -> None:
    given = list(inspect.signature(nn.Module._load_from_state_dict).parameters)
    assert given == [
        "self",
        "state_dict",
        "prefix",
        "local_metadata",
        "strict",
        "missing_keys",
        "unexpected_keys",
        "error_msgs",
    ]


def test_a_dtensor_keeps_its_local_tensor() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(2, 3)
    parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    with torch.no_grad():
        kept = parameter._local_tensor  # type: ignore[attr-defined]
        assert type(kept) is Tensor
        assert torch.equal(kept, local)
        assert kept.data_ptr() == parameter.to_local().data_ptr()  # type: ignore[attr-defined]


def test_hooks_behind_accumulation_have_an_order() -> None:
    parameter, seen = nn.Parameter(torch.ones(1)), []
    for name in ("second", "first"):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    second, first = hooks.items()
    hooks.clear()
    hooks.update([first, second])
    parameter.sum().backward()
    assert seen == ["first", "second"]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_multiplies() -> None:
    # product.cpp declares it itself; without it, products in 16 bits take addmm's way.
    symbol = "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
    assert exported(symbol), f"torch {torch.__version__} exports no at::native::mkldnn_matmul"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_every_use_has_a_row(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"\btorch(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*", text)) <= set(NAMES)
