// The plain formulas of activations and gated linear units, which kernels are tested against.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "../../../csrc/kernels/types.h"

namespace transformer_ops::kernel {

using Real = long double;

inline Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }

inline Real activation(Activation a, Real x) {
  switch (a) {
    case Activation::GELU:
      return x / 2 *
             (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846L) * (x + 0.044715L * x * x * x)));
    case Activation::ExactGELU:
      return x / 2 * std::erfc(-x / std::sqrt(Real(2)));
    case Activation::QGELU:
      return x * sigmoid(1.702L * x);
    case Activation::ReLU:
      return x > 0 ? x : 0;
    case Activation::SReLU:
      return x > 0 ? x * x : 0;
    case Activation::SiLU:
      return x * sigmoid(x);
  }
  return 0;
}

inline Real glu(const Glu& glu, Real a, Real b) {
  switch (glu.kind) {
    case GluKind::GLU:
      return sigmoid(a) * b;
    case GluKind::GEGLU:
      return activation(Activation::GELU, a) * b;
    case GluKind::ExactGEGLU:
      return activation(Activation::ExactGELU, a) * b;
    case GluKind::QGEGLU:
      return activation(Activation::QGELU, a) * b;
    case GluKind::ReGLU:
      return activation(Activation::ReLU, a) * b;
    case GluKind::SReGLU:
      return activation(Activation::SReLU, a) * b;
    case GluKind::SwiGLU:
      return activation(Activation::SiLU, a) * b;
    case GluKind::SiTUGLU: {
      const Real beta1 = glu.beta1, beta2 = glu.beta2;
      return beta1 * std::tanh(a / beta1) * sigmoid(a) * beta2 * std::tanh(b / beta2);
    }
    case GluKind::ClampedSwiGLU: {
      const Real limit = glu.limit;
      const Real gate = std::min(a, limit), linear = std::clamp(b, -limit, limit);
      return gate * sigmoid(glu.alpha * gate) * (linear + glu.offset);
    }
  }
  return 0;
}

inline double derivative(const std::function<Real(Real)>& f, Real x) {
  const Real step = 1e-5L;
  return static_cast<double>((f(x + step) - f(x - step)) / (2 * step));
}

}  // namespace transformer_ops::kernel
