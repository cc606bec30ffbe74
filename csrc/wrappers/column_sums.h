// What CUDA bodies whose kernel adds up columns share.
#pragma once

#include "kernels/bias.h"
#include "wrappers/cuda.h"

namespace transformer_ops::cuda {

// Where the kernel leaves the sums over the rows of a matrix of `rows` x `width`, and the memory
// that it needs on the way.
struct ColumnSums {
  // `like` is a matrix of the kernel's dtype; `out` takes the sums of its columns.
  ColumnSums(const at::Tensor& like, const at::Tensor& out);

  int64_t rows, width;
  at::Tensor partials;
  ColumnSum kernel;
};

}  // namespace transformer_ops::cuda
