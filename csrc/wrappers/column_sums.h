// Code shared by CUDA kernel wrappers whose kernel adds up columns.
#pragma once

#include "kernels/bias.h"
#include "wrappers/cuda.h"

namespace transformer_ops::cuda {

// The destination of the kernel's sums over the rows of a `rows` x `width` matrix, and the
// temporary memory that the kernel needs.
struct ColumnSums {
  // `like` is a matrix of the kernel's dtype; `out` takes the sums of its columns.
  ColumnSums(const at::Tensor& like, const at::Tensor& out);

  int64_t rows, width;
  at::Tensor partials;
  ColumnSum kernel;
};

}  // namespace transformer_ops::cuda
