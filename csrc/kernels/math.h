// The scalar formulas of activations, gated linear units and norms, for host loops and device
// kernels.
//
// A is the compute type: float, double, or a vector of them that has its own elementary functions
// (cpu/simd_math.h). NaN and infinity pass as in PyTorch's formulas.
//
// Everything has internal linkage: the header is compiled for several instruction sets, and the
// linker must not use an AVX-512 copy of a function on older machines.
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
TRANSFORMER_OPS_MATH float log(float x) { return ::logf(x); }
TRANSFORMER_OPS_MATH double log(double x) { return ::log(x); }

TRANSFORMER_OPS_MATH float exp_of_nonpositive(float x) { return ::expf(x); }
TRANSFORMER_OPS_MATH double exp_of_nonpositive(double x) { return ::exp(x); }
TRANSFORMER_OPS_MATH float exp2_of_nonpositive(float x) { return ::exp2f(x); }
TRANSFORMER_OPS_MATH double exp2_of_nonpositive(double x) { return ::exp2(x); }
TRANSFORMER_OPS_MATH float tanh(float x) { return ::tanhf(x); }
TRANSFORMER_OPS_MATH double tanh(double x) { return ::tanh(x); }

// The standard normal distribution at t >= 0: its density, and the share that is beyond t.
template <class A>
struct Normal {
  A density, beyond;
};
TRANSFORMER_OPS_MATH float share_beyond(float t) {
#if defined(__CUDA_ARCH__)
  return ::normcdff(-t);
#else
  return 0.5f * ::erfcf(0.70710678f * t);
#endif
}
TRANSFORMER_OPS_MATH double share_beyond(double t) { return 0.5 * ::erfc(0.7071067811865476 * t); }
template <class A>
TRANSFORMER_OPS_MATH Normal<A> normal(A t) {
  return {A(0.3989422804014327) * exp_of_nonpositive(A(-0.5) * (t * t)), share_beyond(t)};
}

// a b + c, rounded once.
TRANSFORMER_OPS_MATH float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
TRANSFORMER_OPS_MATH double fused(double a, double b, double c) { return ::fma(a, b, c); }

template <class A>
TRANSFORMER_OPS_MATH A minus_abs(A x) {
  return -abs(x);
}
template <class A>
TRANSFORMER_OPS_MATH A select(bool condition, A a, A b) {
  return condition ? a : b;
}
template <class A>
TRANSFORMER_OPS_MATH A at_most(A x, double bound) {
  return x > A(bound) ? A(bound) : x;
}
// a where x is negative, else b; either one for zeros and NaN.
template <class A>
TRANSFORMER_OPS_MATH A select_negative(A x, A a, A b) {
  return x < A(0) ? a : b;
}

// ---- activations: forward(x), and backward(grad_y, x) = grad_x ----

// sigmoid(x) and sigmoid(-x), neither of which cancels or overflows.
template <class A>
struct SigmoidParts {
  A value, complement;
};

// Computed from e = exp(-|x|).
template <class A>
TRANSFORMER_OPS_MATH SigmoidParts<A> sigmoid_parts(A x, A e) {
  const A tail = e / (A(1) + e), d = A(1) - tail;
  return {select_negative(x, tail, d), select_negative(x, d, tail)};
}

// y sigmoid(x), computed from e = exp(-|x|).
template <class A>
TRANSFORMER_OPS_MATH A times_sigmoid(A y, A x, A e) {
  return select_negative(x, y * e, y) / (A(1) + e);
}

template <class A>
TRANSFORMER_OPS_MATH SigmoidParts<A> sigmoid(A x) {
  return sigmoid_parts(x, exp_of_nonpositive(minus_abs(x)));
}
template <class A>
TRANSFORMER_OPS_MATH A times_sigmoid(A y, A x) {
  return times_sigmoid(y, x, exp_of_nonpositive(minus_abs(x)));
}

template <class A>
TRANSFORMER_OPS_MATH A sigmoid_slope(A x) {
  const auto s = sigmoid(x);
  return s.value * s.complement;
}

// The sigmoid of t ln 2.
template <class A>
TRANSFORMER_OPS_MATH SigmoidParts<A> sigmoid2(A t) {
  return sigmoid_parts(t, exp2_of_nonpositive(minus_abs(t)));
}
template <class A>
TRANSFORMER_OPS_MATH A times_sigmoid2(A y, A t) {
  return times_sigmoid(y, t, exp2_of_nonpositive(minus_abs(t)));
}

struct Sigmoid {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return sigmoid(x).value;
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return grad * sigmoid_slope(x);
  }
};

struct SiLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return times_sigmoid(x, x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    const auto s = sigmoid(x);
    return grad * (s.value * (A(1) + x * s.complement));
  }
};

// x sigmoid(1.702 x)
struct QGELU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return times_sigmoid(x, A(1.702) * x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    const auto s = sigmoid(A(1.702) * x);
    return grad * (s.value + (x * s.value) * (A(1.702) * s.complement));
  }
};

// The tanh form, x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), as x sigmoid(2u): the
// same function, without the cancellation in the negative tail. t is 2u / ln 2.
struct GELU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    const A t = x * (A(kLog2e * kLinear) + A(kLog2e * kCubic) * (x * x));
    return times_sigmoid2(x, t);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    // For |x| > 100 the sigmoid is 0 or 1; the bound prevents 0 * inf in the gradient.
    const A square = at_most(x * x, 1e4);
    const A t = x * (A(kLog2e * kLinear) + A(kLog2e * kCubic) * square);
    const auto s = sigmoid2(t);
    const A slope = s.complement * (A(kLinear) + A(3 * kCubic) * square);
    return grad * (s.value + (x * s.value) * slope);
  }

 private:
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;
  static constexpr double kLog2e = 1.4426950408889634;
};

// x/2 (1 + erf(x / sqrt(2))), without the cancellation in the negative tail.
struct ExactGELU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    const A beyond = normal(abs(x)).beyond;
    return x * select_negative(x, beyond, A(1) - beyond);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    const A t = abs(x);
    const auto n = normal(t);
    // The slopes at x and -x add up to one.
    const A slope = fused(-t, n.density, n.beyond);
    return grad * select_negative(x, slope, A(1) - slope);
  }
};

struct ReLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return select(x <= A(0), A(0), x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return select(x <= A(0), A(0), grad);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward_from_output(A grad, A y) const {
    return select(y <= A(0), A(0), grad);
  }
};

// relu(x)^2
struct SReLU {
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A x) const {
    return select(x <= A(0), A(0), x * x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward(A grad, A x) const {
    return select(x <= A(0), A(0), grad * (A(2) * x));
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A backward_from_output(A grad, A y) const {
    return select(y <= A(0), A(0), grad * (A(2) * sqrt(y)));
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
template <class Number>
struct SiTUGLU {
  Number beta1, beta2;

  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A gate, A linear) const {
    const A b1(beta1), b2(beta2);
    return (b1 * tanh(gate / b1) * sigmoid(gate).value) * (b2 * tanh(linear / b2));
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER GluGrads<A> backward(A grad, A gate, A linear) const {
    const A b1(beta1), b2(beta2);
    const A gate_tanh = tanh(gate / b1);
    const A linear_tanh = tanh(linear / b2);
    const auto s = sigmoid(gate);
    const A slope_of_sigmoid = s.value * s.complement;
    const A gate_slope =
        fused(A(1) - gate_tanh * gate_tanh, s.value, b1 * gate_tanh * slope_of_sigmoid);
    return {grad * (b2 * linear_tanh) * gate_slope,
            grad * (b1 * gate_tanh * s.value) * (A(1) - linear_tanh * linear_tanh)};
  }
};

// gate sigmoid(alpha gate) (linear + offset), with gate clamped above, and linear on both sides.
// The gradient passes at the limit, but not beyond it, and not if the clamped input is NaN.
template <class Number>
struct ClampedSwiGLU {
  Number limit, alpha, offset;

  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A forward(A gate, A linear) const {
    const A a = clamp_above(gate);
    return a * sigmoid(A(alpha) * a).value * (clamp(linear) + A(offset));
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER GluGrads<A> backward(A grad, A gate, A linear) const {
    const A a = clamp_above(gate), most(limit);
    const auto s = sigmoid(A(alpha) * a);
    const A slope = s.value + (a * s.value) * (A(alpha) * s.complement);
    const A gate_grad = grad * (clamp(linear) + A(offset)) * slope;
    const A linear_grad = grad * (a * s.value);
    return {select(gate <= most, gate_grad, A(0)), select(abs(linear) <= most, linear_grad, A(0))};
  }

 private:
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A clamp_above(A x) const {
    return select(x > A(limit), A(limit), x);
  }
  template <class A>
  TRANSFORMER_OPS_MATH_MEMBER A clamp(A x) const {
    return clamp_above(select(x < A(-limit), A(-limit), x));
  }
};

// ---- norms, for one element of a row ----

// The normalized number; mean is 0 if the norm does not center.
template <class A>
TRANSFORMER_OPS_MATH A normalized(A x, A mean, A rstd) {
  return (x - mean) * rstd;
}

// The gradient of x from that of n. The means are over the row, of grad_n and of grad_n n. For a
// norm that does not center the first is 0; for L2 normalization the second is a sum.
template <class A>
TRANSFORMER_OPS_MATH A normalized_backward(A grad_n, A n, A rstd, A mean_grad, A mean_grad_n) {
  return ((grad_n - mean_grad) - n * mean_grad_n) * rstd;
}

}  // namespace
}  // namespace transformer_ops::math
