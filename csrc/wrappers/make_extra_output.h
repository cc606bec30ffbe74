// Code shared by the backward fusions that contain MakeExtraOutput.
#pragma once

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// The reason why a backward rule that starts with MakeExtraOutput does not apply, or none.
std::optional<std::string> no_extra_gradient(const Match& match);

// The sum of a gradient like `grad_input` and the extra output's gradient, in the wider of their
// dtypes. Raises if they do not fit.
TensorSpec with_extra_gradient(const Checks& check, const TensorSpec& grad_input,
                               const Tensor& grad_extra_output);

// The extra output's gradient, which the kernel of a norm's backward adds to `sum`.
struct ExtraGradient {
  ExtraGradient(const Tensor& grad_extra_output, const Tensor& input, const Tensor& sum);

  Tensor gradient;       // in the sum's dtype
  at::ScalarType dtype;  // the dtype that the norm's own tensors must have
  bool wide;             // sum and gradient have the kernel's compute type
};

}  // namespace transformer_ops
