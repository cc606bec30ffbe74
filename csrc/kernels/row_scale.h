// Rows times a vector, and each row times a number: LayerScale and DropPath.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

// The factor of element i of row r is gamma[i] factors[r / rows_per_factor]; both are acc, and null
// counts as 1.
struct RowScale {
  const void* gamma = nullptr;
  const void* factors = nullptr;
  int64_t rows_per_factor = 1;
};

// y = x scaled + extra; extra may be null. x, extra and y start at row `first`.
inline const Kernel<void(DType, const void* x, const RowScale&, const void* extra, void* y,
                         int64_t first, int64_t rows, int64_t h)>
    row_scale{"row_scale"};

// grad_x = grad_y scaled; the column sums of grad_y factors[] x are added to grad_gamma.
inline const Kernel<void(DType, const void* grad_y, const void* x, const RowScale&, void* grad_x,
                         void* grad_gamma, int64_t first, int64_t rows, int64_t h)>
    row_scale_backward{"row_scale_backward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

struct ColumnSum;

struct RowScale {
  Vector gamma = {};
  const void* factors = nullptr;  // acc
  int64_t rows_per_factor = 1;
};

inline const Kernel<void(Stream, DType, const void* x, const RowScale&, const void* extra, void* y,
                         int64_t rows, int64_t h)>
    row_scale{"row_scale"};

inline const Kernel<void(Stream, DType, const void* grad_y, const void* x, const RowScale&,
                         void* grad_x, const ColumnSum& grad_gamma, int64_t rows, int64_t h)>
    row_scale_backward{"row_scale_backward"};

}  // namespace transformer_ops::cuda
