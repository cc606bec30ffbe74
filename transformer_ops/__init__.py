"""transformer_ops: transformer blocks as lists of small ops, fused by a C++ op fuser."""

import os as _os
from importlib import import_module as _import_module

from ._loader import build_info as _built
from ._loader import load as _load

_load()

from . import library as _library  # noqa: E402
from . import ops as _ops  # noqa: E402
from . import quantization, recipe  # noqa: E402
from .base.cpu import Processor, processor  # noqa: E402
from .fusion.pattern import optional  # noqa: E402
from .fusion.registry import (  # noqa: E402
    FusionHandle,
    fusions,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .library import load_library  # noqa: E402
from .models import (  # noqa: E402
    FuseReport,
    FuseRule,
    FuseSkip,
    fuse,
    register_fuse_rule,
    unfuse,
    unfused,
)
from .modules.fuser import OperationFuser  # noqa: E402
from .modules.residual import Residual  # noqa: E402
from .modules.sequential import Sequential  # noqa: E402
from .modules.views import view  # noqa: E402
from .op import (  # noqa: E402
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
)
from .ops import *  # noqa: E402, F403
from .plan.plan import Plan  # noqa: E402
from .quantization import quantizer_of as _quantizer_of  # noqa: E402, F401
from .quantization.available import (  # noqa: E402
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .quantization.frozen import frozen_weights  # noqa: E402
from .quantization.model_init import quantized_model_init  # noqa: E402
from .quantization.quantized_tensor import QuantizedTensor  # noqa: E402
from .quantization.quantizers import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from .quantization.region import autocast  # noqa: E402

_library.listen()
memory = _import_module(".memory", __name__)
testing = _import_module(".testing", __name__)


def __getattr__(name: str) -> object:
    # This is imported on demand, because it loads DTensor.
    if name == "parallel":
        return _import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists only the public API, without the modules that contain it."""
    return sorted([*__all__, "__version__", "parallel"])


__version__: str = _built().VERSION

# For CMAKE_PREFIX_PATH: lets find_package(transformer_ops) work in a C++ project.
cmake_prefix_path = _os.path.join(_os.path.dirname(__file__), "share", "cmake")

__all__ = [
    "BasicOperation",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "FuseReport",
    "FuseRule",
    "FuseSkip",
    "FusedOperation",
    "FusibleOperation",
    "FusionHandle",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "OperationContext",
    "OperationFuser",
    "Plan",
    "Processor",
    "QuantizedTensor",
    "Residual",
    "Sequential",
    "autocast",
    "cmake_prefix_path",
    "frozen_weights",
    "fuse",
    "fusions",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "load_library",
    "memory",
    "optional",
    "processor",
    "quantization",
    "quantized_model_init",
    "recipe",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "register_fuse_rule",
    "testing",
    "unfuse",
    "unfused",
    "view",
]
__all__ += _ops.__all__
