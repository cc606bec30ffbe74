// Products on CUDA: by cuBLASLt if it has an algorithm, else by ATen. Operands may have any
// strides; biases and residuals are contiguous.
//
// Operands may have scales, which stay in device memory, and may then be codes. If float32 cannot
// hold the product of both scales, the result is zero or infinite, and NaN where it would be zero.
#pragma once

#include <optional>

#include "wrappers/linear.h"

namespace transformer_ops {

// scale x W^T [+ b] for any number of leading dimensions.
Tensor linear_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                   double scale = 1.0, const OperandScales& scales = {});

// x W^T [+ b] into `out`, a matrix whose rows need not be adjacent.
void linear_into_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias, Tensor out);

// gelu(x W^T + b) by one kernel, or none if there is no such kernel. `kept`, if not null, receives
// the argument of gelu.
std::optional<Tensor> linear_gelu_cuda(const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, Tensor* kept,
                                       const OperandScales& scales = {});

// scale x W^T [+ b] + extra, all of one dtype; `extra` has the result's shape, and any strides.
Tensor linear_add_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias,
                       const Tensor& extra, double scale = 1.0, const OperandScales& scales = {});

// The same as linear_backward_cpu. With a float32 residual, the gradient of a 16-bit input is also
// float32.
LinearBackward linear_backward_cuda(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                    const LinearGradients& fused = {});

// The two halves of linear_backward_cuda: grad_output W, and scale grad_output^T input into
// `grad_weight` of any dtype.
struct WeightGradient {
  bool adds = false;  // adds to grad_weight
  double scale = 1.0;
  // If defined, receives the column sums of grad_output, which must be contiguous; scale must be 1.
  Tensor grad_bias = {};
  OperandScales scales = {};
};
Tensor linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight);
void linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight,
                                const Tensor& grad_input);
void linear_weight_gradient_cuda(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& grad_weight, const WeightGradient& how = {});

}  // namespace transformer_ops
