// Matrix products on the CPU, each by the faster of PyTorch's libraries.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_ops {

// matrix.t() without the dispatcher.
at::Tensor transposed(const at::Tensor& matrix);

// matrix.narrow(0, first, count), matrix.narrow(1, first, count) and stack.select(0, index),
// without the dispatcher.
at::Tensor rows_of(const at::Tensor& matrix, int64_t first, int64_t count);
at::Tensor columns_of(const at::Tensor& matrix, int64_t first, int64_t count);
at::Tensor matrix_of(const at::Tensor& stack, int64_t index);

// out = beta out + scale left right, for matrices of one dtype.
void multiply_cpu(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                  double beta = 0.0, double scale = 1.0);

// May a product of this size run in oneDNN, which compiles a kernel for each new shape?
bool may_compile_kernel(at::ScalarType dtype, int64_t multiplications);

}  // namespace transformer_ops
