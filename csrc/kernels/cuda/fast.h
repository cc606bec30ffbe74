// The compute type of kernels whose results are rounded to 16 bits: float, with exponentials and
// quotients by the approximations that the hardware computes in one instruction. Their errors, a
// few units of float's last place and |x| units for exp(x), are a thousandth of the last rounding.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/math.h"

namespace transformer_ops::cuda {
namespace {

struct Fast {
  float value;

  Fast() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  TRANSFORMER_OPS_MATH_MEMBER explicit Fast(Number x) : value(static_cast<float>(x)) {}
};

TRANSFORMER_OPS_MATH Fast operator-(Fast a) { return Fast(-a.value); }
TRANSFORMER_OPS_MATH Fast operator+(Fast a, Fast b) { return Fast(a.value + b.value); }
TRANSFORMER_OPS_MATH Fast operator-(Fast a, Fast b) { return Fast(a.value - b.value); }
TRANSFORMER_OPS_MATH Fast operator*(Fast a, Fast b) { return Fast(a.value * b.value); }
TRANSFORMER_OPS_MATH Fast operator/(Fast a, Fast b) { return Fast(a.value / b.value); }
TRANSFORMER_OPS_MATH bool operator<(Fast a, Fast b) { return a.value < b.value; }
TRANSFORMER_OPS_MATH bool operator>(Fast a, Fast b) { return a.value > b.value; }
TRANSFORMER_OPS_MATH bool operator<=(Fast a, Fast b) { return a.value <= b.value; }

TRANSFORMER_OPS_MATH Fast abs(Fast x) { return Fast(::fabsf(x.value)); }
TRANSFORMER_OPS_MATH Fast sqrt(Fast x) { return Fast(::sqrtf(x.value)); }
TRANSFORMER_OPS_MATH Fast tanh(Fast x) { return Fast(::tanhf(x.value)); }
TRANSFORMER_OPS_MATH Fast fused(Fast a, Fast b, Fast c) {
  return Fast(::fmaf(a.value, b.value, c.value));
}

TRANSFORMER_OPS_MATH Fast exp2_of_nonpositive(Fast x) { return Fast(::exp2f(x.value)); }
TRANSFORMER_OPS_MATH Fast exp_of_nonpositive(Fast x) {
  return Fast(::exp2f(1.4426950408889634f * x.value));
}

// 1 / (1 + e) for e in [0, 1].
TRANSFORMER_OPS_MATH Fast reciprocal_of_one_plus(Fast e) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + e.value));
  return Fast(result);
#else
  return Fast(1.0f / (1.0f + e.value));
#endif
}

// In place of those of math.h.
TRANSFORMER_OPS_MATH math::SigmoidParts<Fast> sigmoid_parts(Fast x, Fast e) {
  const Fast d = reciprocal_of_one_plus(e), tail = e * d;
  return {math::select_negative(x, tail, d), math::select_negative(x, d, tail)};
}
TRANSFORMER_OPS_MATH Fast times_sigmoid(Fast y, Fast x, Fast e) {
  return y * math::select_negative(x, e, Fast(1)) * reciprocal_of_one_plus(e);
}

// What elements of type T are computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, Acc<T>>, T, Fast>;

template <class T>
TRANSFORMER_OPS_DEVICE Compute<T> to_compute(T x) {
  return Compute<T>(to_acc(x));
}

TRANSFORMER_OPS_DEVICE float to_acc(Fast x) { return x.value; }

}  // namespace
}  // namespace transformer_ops::cuda
