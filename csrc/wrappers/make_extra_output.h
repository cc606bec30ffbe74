// What the backward fusions that contain MakeExtraOutput share.
#pragma once

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Why a backward rule that starts with MakeExtraOutput does not fire, or none.
std::optional<std::string> no_extra_gradient(const Match& match);

// The sum of a gradient like `grad_input` and of the extra output's, in the wider of their dtypes.
// Raises where they do not fit.
TensorSpec with_extra_gradient(const Checks& check, const TensorSpec& grad_input,
                               const Tensor& grad_extra_output);

// How a kernel for a norm of `input` adds the extra output's gradient on the way to `sum`.
struct ExtraGradient {
  ExtraGradient(const Tensor& grad_extra_output, const Tensor& input, const Tensor& sum);

  Tensor gradient;       // in the sum's dtype
  at::ScalarType dtype;  // that the norm's own tensors must have
  bool wide;             // sum and gradient have the kernel's compute type
};

}  // namespace transformer_ops
