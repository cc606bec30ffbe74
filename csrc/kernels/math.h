// Scalar formulas of the activations and gated linear units, for host loops and device kernels.
//
// A is the compute type, float or double. On the host the float versions are free of branches and
// calls, so that a compiler vectorizes loops over them; they are good to about 2 ulp on the whole
// range. NaN and infinity pass as in PyTorch's formulas.
//
// Everything has internal linkage: the header is compiled for several instruction sets, and the
// linker must not merge an AVX-512 copy of a function into a program path for older machines.
#pragma once

#include <math.h>

#include <cstdint>

#if defined(__CUDACC__)
#define TRANSFORMER_OPS_MATH static __host__ __device__ __forceinline__
#define TRANSFORMER_OPS_MATH_MEMBER __host__ __device__ __forceinline__
#else
#define TRANSFORMER_OPS_MATH [[maybe_unused]] static inline __attribute__((always_inline))
#define TRANSFORMER_OPS_MATH_MEMBER inline __attribute__((always_inline))
#endif

namespace transformer_ops::math {
namespace {

// ---- elementary functions ----

TRANSFORMER_OPS_MATH float sqrt(float x) { return ::sqrtf(x); }
TRANSFORMER_OPS_MATH double sqrt(double x) { return ::sqrt(x); }
TRANSFORMER_OPS_MATH float abs(float x) { return ::fabsf(x); }
TRANSFORMER_OPS_MATH double abs(double x) { return ::fabs(x); }

TRANSFORMER_OPS_MATH double exp_of_nonpositive(double x) { return ::exp(x); }
TRANSFORMER_OPS_MATH double tanh(double x) { return ::tanh(x); }

#if defined(__CUDA_ARCH__)

TRANSFORMER_OPS_MATH float exp_of_nonpositive(float x) { return ::expf(x); }
TRANSFORMER_OPS_MATH float tanh(float x) { return ::tanhf(x); }

#else

TRANSFORMER_OPS_MATH uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
TRANSFORMER_OPS_MATH float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// x = k ln 2 + r with |r| <= ln(2) / 2.
struct ExpReduction {
  float power_of_two;  // 2^k
  float expm1;         // exp(r) - 1
};

// Right for -126 <= k <= 127. NaN gives expm1 = NaN and an arbitrary 2^k. Adding 1.5 * 2^23 rounds
// to an integer and leaves it in the low bits. Coefficients: Cephes expf.
TRANSFORMER_OPS_MATH ExpReduction reduce_exp(float x) {
  const float shifter = 12582912.0f;
  const float shifted = x * 1.44269504f + shifter;
  const float k = shifted - shifter;
  float r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const uint32_t exponent = to_bits(shifted) - to_bits(shifter) + 127u;
  return {from_bits(exponent << 23), p * (r * r) + r};
}

// Subnormal results are flushed to zero.
TRANSFORMER_OPS_MATH float exp_of_nonpositive(float x) {
  const ExpReduction e = reduce_exp(x);
  const float result = e.expm1 * e.power_of_two + e.power_of_two;
  return x < -87.3365f ? 0.0f : result;
}

// tanh |x| = u / (u + 2) with u = exp(2 |x|) - 1, accurate for small x too.
TRANSFORMER_OPS_MATH float tanh(float x) {
  const uint32_t sign = to_bits(x) & 0x80000000u;
  const float magnitude = from_bits(to_bits(x) ^ sign);
  // Beyond 10 the result is 1; written so that NaN stays.
  const ExpReduction e = reduce_exp(2.0f * (magnitude > 10.0f ? 10.0f : magnitude));
  const float u = e.expm1 * e.power_of_two + (e.power_of_two - 1.0f);
  return from_bits(to_bits(u / (u + 2.0f)) | sign);
}

#endif

// ---- activations: forward(x), and backward(grad_y, x) = grad_x ----

// sigmoid(x) and its derivative, neither of which cancels or overflows.
template <class A>
struct SigmoidParts {
  A value, slope;
};

template <class A>
TRANSFORMER_OPS_MATH SigmoidParts<A> sigmoid(A x) {
  const A e = exp_of_nonpositive(-abs(x));
  const A d = A(1) / (A(1) + e);
  const A tail = e * d;
  return {x < A(0) ? tail : d, tail * d};
}

struct Sigmoid {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return sigmoid(x).value;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return grad * sigmoid(x).slope;
  }
};

struct SiLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return x * sigmoid(x).value;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    const auto s = sigmoid(x);
    return grad * (s.value + x * s.slope);
  }
};

// x sigmoid(1.702 x)
struct QGELU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return x * sigmoid(A(1.702) * x).value;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    const auto s = sigmoid(A(1.702) * x);
    return grad * (s.value + A(1.702) * (x * s.slope));
  }
};

// The tanh form, x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), as x sigmoid(2u): the
// same function, without the cancellation in the negative tail.
struct GELU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return x * sigmoid(x * (A(kLinear) + A(kCubic) * (x * x))).value;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    // For |x| > 100 the sigmoid is 0 or 1; the bound keeps 0 * inf out of the gradient.
    const A square = x * x > A(1e4) ? A(1e4) : x * x;
    const auto s = sigmoid(x * (A(kLinear) + A(kCubic) * square));
    return grad * (s.value + x * s.slope * (A(kLinear) + A(3 * kCubic) * square));
  }

 private:
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;
};

struct ReLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return x <= A(0) ? A(0) : x;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return x <= A(0) ? A(0) : grad;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward_from_output(A grad, A y) const {
    return y <= A(0) ? A(0) : grad;
  }
};

// relu(x)^2
struct SReLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return x <= A(0) ? A(0) : x * x;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return x <= A(0) ? A(0) : grad * (A(2) * x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward_from_output(A grad, A y) const {
    return y <= A(0) ? A(0) : grad * (A(2) * sqrt(y));
  }
};

// ---- gated linear units: forward(gate, linear), and both gradients ----

template <class A>
struct GluGrads {
  A gate, linear;
};

template <class Gate>
struct GatedBy {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A gate, A linear) const {
    return Gate().forward(gate) * linear;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER GluGrads<A> backward(A grad, A gate, A linear) const {
    return {Gate().backward(grad * linear, gate), grad * Gate().forward(gate)};
  }
};

// beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)
template <class A>
struct SiTUGLU {
  A beta1, beta2;

  TRANSFORMER_OPS_MATH_MEMBER A forward(A gate, A linear) const {
    return (beta1 * tanh(gate / beta1) * sigmoid(gate).value) * (beta2 * tanh(linear / beta2));
  }
  TRANSFORMER_OPS_MATH_MEMBER GluGrads<A> backward(A grad, A gate, A linear) const {
    const A gate_tanh = tanh(gate / beta1);
    const A linear_tanh = tanh(linear / beta2);
    const auto s = sigmoid(gate);
    const A gate_slope = (A(1) - gate_tanh * gate_tanh) * s.value + beta1 * gate_tanh * s.slope;
    return {grad * (beta2 * linear_tanh) * gate_slope,
            grad * (beta1 * gate_tanh * s.value) * (A(1) - linear_tanh * linear_tanh)};
  }
};

// gate sigmoid(alpha gate) (linear + offset), gate clamped above, linear on both sides. The
// gradient passes at the limit, not beyond it, and not where the clamped input is NaN.
template <class A>
struct ClampedSwiGLU {
  A limit, alpha, offset;

  TRANSFORMER_OPS_MATH_MEMBER A forward(A gate, A linear) const {
    const A a = clamp_above(gate);
    return a * sigmoid(alpha * a).value * (clamp(linear) + offset);
  }
  TRANSFORMER_OPS_MATH_MEMBER GluGrads<A> backward(A grad, A gate, A linear) const {
    const A a = clamp_above(gate);
    const auto s = sigmoid(alpha * a);
    const A gate_grad = grad * (clamp(linear) + offset) * (s.value + alpha * (a * s.slope));
    const A linear_grad = grad * (a * s.value);
    return {gate <= limit ? gate_grad : A(0), abs(linear) <= limit ? linear_grad : A(0)};
  }

 private:
  TRANSFORMER_OPS_MATH_MEMBER A clamp_above(A x) const { return x > limit ? limit : x; }
  TRANSFORMER_OPS_MATH_MEMBER A clamp(A x) const {
    const A low = x < -limit ? -limit : x;
    return low > limit ? limit : low;
  }
};

}  // namespace
}  // namespace transformer_ops::math
