#pragma once

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises unless the bias has one number for each element of the input's last dimension.
void check_bias(const Checks& check, const Tensor& input, const Tensor& bias);

// output = input + bias in each row; the output may be the input.
void add_bias_cpu(const Tensor& input, const Tensor& bias, const Tensor& output);
void add_bias_cuda(const Tensor& input, const Tensor& bias, const Tensor& output);

// The bias gradient: one number for each element of the last dimension, in the gradient's dtype.
TensorSpec bias_gradient(const Tensor& grad_output);

// The sums over the rows of a contiguous gradient, into `grad_bias`.
Tensor sum_of_rows(const Tensor& grad_output);  // the decomposition
void sum_columns_cpu(const Tensor& grad_output, Tensor& grad_bias);
void sum_columns_cuda(const Tensor& grad_output, const Tensor& grad_bias);

// The reason why a backward rule that starts with Bias does not apply, or none.
std::optional<std::string> no_bias_gradient(const Match& match);

}  // namespace transformer_ops
