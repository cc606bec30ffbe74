// The types in which elements are computed, for the formulas of math.h: double in double, all
// others in float, as exactly as the result needs.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/math.h"

namespace transformer_ops::cuda {
namespace {

// The number of bits of the result that matter. For 16-bit types, exponentials and reciprocals use
// single hardware instructions: their errors, a few units of float's last place and |x| units for
// exp(x), are a thousandth of the last rounding. For float, the rounding errors of a sigmoid and of
// its product are added back.
enum class Precision { Bits16, Bits32 };

template <Precision precision>
struct Number {
  float value;

  Number() = default;
  template <class X, class = std::enable_if_t<std::is_arithmetic_v<X>>>
  TRANSFORMER_OPS_MATH_MEMBER explicit Number(X x) : value(static_cast<float>(x)) {}

  TRANSFORMER_OPS_MATH_MEMBER friend Number operator-(Number a) { return Number(-a.value); }
  TRANSFORMER_OPS_MATH_MEMBER friend Number operator+(Number a, Number b) {
    return Number(a.value + b.value);
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number operator-(Number a, Number b) {
    return Number(a.value - b.value);
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number operator*(Number a, Number b) {
    return Number(a.value * b.value);
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number operator/(Number a, Number b) {
    return Number(a.value / b.value);
  }
  TRANSFORMER_OPS_MATH_MEMBER friend bool operator<(Number a, Number b) {
    return a.value < b.value;
  }
  TRANSFORMER_OPS_MATH_MEMBER friend bool operator>(Number a, Number b) {
    return a.value > b.value;
  }
  TRANSFORMER_OPS_MATH_MEMBER friend bool operator<=(Number a, Number b) {
    return a.value <= b.value;
  }

  TRANSFORMER_OPS_MATH_MEMBER friend Number abs(Number x) { return Number(::fabsf(x.value)); }
  TRANSFORMER_OPS_MATH_MEMBER friend Number sqrt(Number x) { return Number(::sqrtf(x.value)); }
  TRANSFORMER_OPS_MATH_MEMBER friend Number tanh(Number x) { return Number(::tanhf(x.value)); }
  TRANSFORMER_OPS_MATH_MEMBER friend Number fused(Number a, Number b, Number c) {
    return Number(::fmaf(a.value, b.value, c.value));
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number exp2_of_nonpositive(Number x) {
    return Number(::exp2f(x.value));
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number exp_of_nonpositive(Number x) {
    if constexpr (precision == Precision::Bits32) return Number(::expf(x.value));
    return Number(::exp2f(1.4426950408889634f * x.value));
  }
  TRANSFORMER_OPS_MATH_MEMBER friend Number share_beyond(Number t) {
    return Number(math::share_beyond(t.value));
  }
};

// 1 / (1 + e) for e in [0, 1], within a unit of the last place.
TRANSFORMER_OPS_MATH float reciprocal_of_one_plus(float e) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + e));
  return result;
#else
  return 1.0f / (1.0f + e);
#endif
}

// The correction of r = reciprocal_of_one_plus(e), which is to be added.
TRANSFORMER_OPS_MATH float rest_of_reciprocal(float e, float r) {
  return r * ::fmaf(-e, r, 1.0f - r);
}

// The sigmoids, which replace those of math.h.
template <Precision precision>
TRANSFORMER_OPS_MATH math::SigmoidParts<Number<precision>> sigmoid_parts(Number<precision> x,
                                                                         Number<precision> e) {
  const float r = reciprocal_of_one_plus(e.value);
  Number<precision> d(r), tail(e.value * r);
  if constexpr (precision == Precision::Bits32) {
    const float rest = rest_of_reciprocal(e.value, r);
    d = Number<precision>(r + rest);
    tail = Number<precision>(::fmaf(e.value, r, e.value * rest));
  }
  return {math::select_negative(x, tail, d), math::select_negative(x, d, tail)};
}

template <Precision precision>
TRANSFORMER_OPS_MATH Number<precision> times_sigmoid(Number<precision> y, Number<precision> x,
                                                     Number<precision> e) {
  const float factor = math::select_negative(x, e, Number<precision>(1)).value;
  const float r = reciprocal_of_one_plus(e.value);
  if constexpr (precision == Precision::Bits16) return Number<precision>(y.value * factor * r);
  const float rest = rest_of_reciprocal(e.value, r);
  // The bound prevents a product of infinity and a correction of zero.
  const float bounded = math::at_most(y.value, 1e30), product = bounded * factor;
  const float lost = ::fmaf(bounded, factor, -product);
  return Number<precision>(::fmaf(y.value * factor, r, ::fmaf(product, rest, lost * r)));
}

template <class T>
using Compute =
    std::conditional_t<std::is_same_v<T, double>, double,
                       Number<std::is_same_v<T, float> ? Precision::Bits32 : Precision::Bits16>>;

template <class T>
TRANSFORMER_OPS_DEVICE Compute<T> to_compute(T x) {
  return Compute<T>(to_acc(x));
}

template <Precision precision>
TRANSFORMER_OPS_DEVICE float to_acc(Number<precision> x) {
  return x.value;
}

}  // namespace
}  // namespace transformer_ops::cuda
