// Backward of a split product with its collectives beside the products.
#pragma once

#include <optional>
#include <string>

#include "bodies/collective.h"
#include "fuser/rule.h"
#include "op/body.h"

namespace transformer_ops {

// grad_output W.
Tensor parallel_input_gradient(const Tensor& grad_output, const Tensor& weight);
// grad_output^T input into `grad_weight`, or added to it where the call says so; and the column
// sums of grad_output into `grad_bias`, where that is defined.
void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias);

// Why a rule of {a collective}{BasicLinear}[{Bias}] does not fire, or none.
std::optional<std::string> why_not_parallel(const Match& match);

}  // namespace transformer_ops
