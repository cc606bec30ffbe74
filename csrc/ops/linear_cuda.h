// Products on CUDA: by cuBLASLt where it has an algorithm, else by ATen. Any strides are taken.
#pragma once

#include <optional>

#include "ops/linear.h"

namespace transformer_ops {

// x W^T [+ b] for any number of leading dimensions.
Tensor linear_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias = {});

// gelu(x W^T + b) by one kernel, or none where there is no such. `kept`, where not null, takes the
// argument of gelu.
std::optional<Tensor> linear_gelu_cuda(const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, Tensor* kept);

// scale x W^T [+ b] + extra, all of one dtype; `extra` has the result's shape.
Tensor linear_add_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias,
                       const Tensor& extra, double scale = 1.0);

// As linear_backward_cpu. With a float32 residual the gradient of a 16-bit input is float32 too.
Tensors linear_backward_cuda(const Tensor& grad_output, Tensor input, const Tensor& weight,
                             const LinearGradients& fused = {});

// grad_output^T input, into `out`.
void linear_weight_gradient_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& out);

}  // namespace transformer_ops
