// Products on CUDA: by cuBLASLt where it has an algorithm, else by ATen. Factors may have any
// strides, biases and residuals are contiguous.
//
// Factors may come with scales, which stay in device memory, and be codes then. Where float32 does
// not hold both scales together, a product is zero or infinite, and NaN where it would be zero.
#pragma once

#include <optional>

#include "wrappers/linear.h"

namespace transformer_ops {

// scale x W^T [+ b] for any number of leading dimensions.
Tensor linear_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                   double scale = 1.0, const OperandScales& scales = {});

// x W^T [+ b] into `out`, a matrix whose rows may lie apart.
void linear_into_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias, Tensor out);

// gelu(x W^T + b) by one kernel, or none where there is no such. `kept`, where not null, takes the
// argument of gelu.
std::optional<Tensor> linear_gelu_cuda(const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, Tensor* kept,
                                       const OperandScales& scales = {});

// scale x W^T [+ b] + extra, all of one dtype; `extra` has the result's shape, and any strides.
Tensor linear_add_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias,
                       const Tensor& extra, double scale = 1.0, const OperandScales& scales = {});

// As linear_backward_cpu. With a float32 residual the gradient of a 16-bit input is float32 too.
LinearBackward linear_backward_cuda(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                    const LinearGradients& fused = {});

// Its two halves: grad_output W, and scale grad_output^T input into `grad_weight` of any dtype.
struct WeightGradient {
  bool adds = false;  // to what is in grad_weight
  double scale = 1.0;
  // Where defined, takes the column sums of grad_output, which is contiguous then; scale is 1.
  Tensor grad_bias = {};
  OperandScales scales = {};
};
Tensor linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight);
void linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight,
                                const Tensor& grad_input);
void linear_weight_gradient_cuda(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& grad_weight, const WeightGradient& how = {});

// Backward of gelu and of the product after it by one kernel: gelu'(input) (grad_output W) into
// `grad_input`, and its column sums into `grad_bias` where that is defined. False where there is no
// such kernel: nothing was done.
bool linear_gelu_backward_cuda(const Tensor& grad_output, const Tensor& weight, const Tensor& input,
                               Tensor& grad_input, const Tensor& grad_bias);

}  // namespace transformer_ops
