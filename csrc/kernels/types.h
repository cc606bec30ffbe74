// What CPU and CUDA kernels are told to compute.
#pragma once

#include <cstdint>

namespace transformer_ops::kernel {

enum class DType : uint8_t { Float32, Float64, Float16, BFloat16 };

enum class Activation : uint8_t { GELU, QGELU, ReLU, SReLU, SiLU };

enum class GluKind : uint8_t { GLU, GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU, SiTUGLU, ClampedSwiGLU };

struct Glu {
  GluKind kind = GluKind::GLU;
  // Size of the alternating blocks of gate and linear half; it divides h. 0: two halves.
  int64_t interleave = 0;
  double beta1 = 4.0, beta2 = 25.0;                 // SiTUGLU
  double limit = 7.0, alpha = 1.702, offset = 1.0;  // ClampedSwiGLU
};

}  // namespace transformer_ops::kernel
