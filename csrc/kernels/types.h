// The parameters that tell CPU and CUDA kernels what to compute.
#pragma once

#include <cstdint>

namespace transformer_ops::kernel {

enum class DType : uint8_t { Float32, Float64, Float16, BFloat16 };

// The elementwise activations; math.h has a formula of each name.
#define TRANSFORMER_OPS_ACTIVATIONS(each) \
  each(GELU) each(ExactGELU) each(QGELU) each(ReLU) each(SReLU) each(SiLU)

#define TRANSFORMER_OPS_NAME(name) name,
enum class Activation : uint8_t { TRANSFORMER_OPS_ACTIVATIONS(TRANSFORMER_OPS_NAME) };
#undef TRANSFORMER_OPS_NAME

enum class GluKind : uint8_t {
  GLU,
  GEGLU,
  ExactGEGLU,
  QGEGLU,
  ReGLU,
  SReGLU,
  SwiGLU,
  SiTUGLU,
  ClampedSwiGLU
};

struct Glu {
  GluKind kind = GluKind::GLU;
  // The size of the alternating blocks of gate and linear half, which divides h. 0: two halves.
  int64_t interleave = 0;
  double beta1 = 4.0, beta2 = 25.0;                 // SiTUGLU
  double limit = 7.0, alpha = 1.702, offset = 1.0;  // ClampedSwiGLU
};

}  // namespace transformer_ops::kernel
