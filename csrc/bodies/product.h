// Matrix products on CPU, each by the faster of PyTorch's libraries.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_ops {

// matrix.t(), without the dispatcher.
at::Tensor transposed(const at::Tensor& matrix);

// out = beta out + scale left right, for matrices of one dtype.
void multiply_cpu(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                  double beta = 0.0, double scale = 1.0);

}  // namespace transformer_ops
