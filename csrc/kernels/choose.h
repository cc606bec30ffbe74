// Selects the formula of what a kernel is asked to compute.
//
// Everything has internal linkage, for the reason given in math.h.
#pragma once

#include "kernels/math.h"
#include "kernels/types.h"

namespace transformer_ops::kernel {
namespace {

template <class F>
void with_activation(Activation activation, F f) {
#define TRANSFORMER_OPS_CASE(name) \
  case Activation::name:           \
    return f(math::name());
  switch (activation) { TRANSFORMER_OPS_ACTIVATIONS(TRANSFORMER_OPS_CASE) }
#undef TRANSFORMER_OPS_CASE
}

// The numbers in the formula have type A.
template <class A, class F>
void with_glu(const Glu& glu, F f) {
  switch (glu.kind) {
    case GluKind::GLU:
      return f(math::GatedBy<math::Sigmoid>());
    case GluKind::GEGLU:
      return f(math::GatedBy<math::GELU>());
    case GluKind::ExactGEGLU:
      return f(math::GatedBy<math::ExactGELU>());
    case GluKind::QGEGLU:
      return f(math::GatedBy<math::QGELU>());
    case GluKind::ReGLU:
      return f(math::GatedBy<math::ReLU>());
    case GluKind::SReGLU:
      return f(math::GatedBy<math::SReLU>());
    case GluKind::SwiGLU:
      return f(math::GatedBy<math::SiLU>());
    case GluKind::SiTUGLU:
      return f(math::SiTUGLU<A>{static_cast<A>(glu.beta1), static_cast<A>(glu.beta2)});
    case GluKind::ClampedSwiGLU:
      return f(math::ClampedSwiGLU<A>{static_cast<A>(glu.limit), static_cast<A>(glu.alpha),
                                      static_cast<A>(glu.offset)});
  }
}

}  // namespace
}  // namespace transformer_ops::kernel
