# Written by tools/make_reference.py; do not edit.
from .activation import GELU as GELU
from .activation import QGELU as QGELU
from .activation import ReLU as ReLU
from .activation import SReLU as SReLU
from .activation import SiLU as SiLU
from .add_extra_input import AddExtraInput as AddExtraInput
from .attention import Attention as Attention
from .attention import QKNorm as QKNorm
from .basic_linear import BasicLinear as BasicLinear
from .bias import Bias as Bias
from .collective import AllGather as AllGather
from .collective import AllReduce as AllReduce
from .collective import ReduceScatter as ReduceScatter
from .constant_scale import ConstantScale as ConstantScale
from .dispatch import Combine as Combine
from .dispatch import Dispatch as Dispatch
from .drop_path import DropPath as DropPath
from .dropout import Dropout as Dropout
from .glu import ClampedSwiGLU as ClampedSwiGLU
from .glu import GEGLU as GEGLU
from .glu import GLU as GLU
from .glu import QGEGLU as QGEGLU
from .glu import ReGLU as ReGLU
from .glu import SReGLU as SReGLU
from .glu import SiTUGLU as SiTUGLU
from .glu import SwiGLU as SwiGLU
from .grouped_linear import GroupedLinear as GroupedLinear
from .identity import Identity as Identity
from .l2_normalization import L2Normalization as L2Normalization
from .layer_scale import LayerScale as LayerScale
from .linear import Linear as Linear
from .linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from .lora_linear import LoRALinear as LoRALinear
from .make_extra_output import MakeExtraOutput as MakeExtraOutput
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .packed_linear import PackedLinear as PackedLinear
from .quantize import Quantize as Quantize
from .reshape import Reshape as Reshape
from .rope import RoPE as RoPE
from .router import Router as Router
from .scaled_activation import ScaledClampedQGeGLU as ScaledClampedQGeGLU
from .scaled_activation import ScaledSReLU as ScaledSReLU
from .scaled_activation import ScaledSiTUGLU as ScaledSiTUGLU
from .scaled_activation import ScaledSwiGLU as ScaledSwiGLU

__all__ = [
    "GELU",
    "QGELU",
    "ReLU",
    "SReLU",
    "SiLU",
    "AddExtraInput",
    "Attention",
    "QKNorm",
    "BasicLinear",
    "Bias",
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "ConstantScale",
    "Combine",
    "Dispatch",
    "DropPath",
    "Dropout",
    "GEGLU",
    "GLU",
    "QGEGLU",
    "ClampedSwiGLU",
    "ReGLU",
    "SReGLU",
    "SiTUGLU",
    "SwiGLU",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerScale",
    "Linear",
    "LinearCrossEntropy",
    "LoRALinear",
    "MakeExtraOutput",
    "LayerNorm",
    "RMSNorm",
    "PackedLinear",
    "Quantize",
    "Reshape",
    "RoPE",
    "Router",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
]
