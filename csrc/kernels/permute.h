// Rows that are copied to several positions, and summed back.
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

// y[r] is the sum of x[positions[r * k + i]] over i < k, in this order; a position of -1 counts as
// zero.
inline const Kernel<void(DType, const void* x, const int32_t* positions, int64_t k, void* y,
                         int64_t rows, int64_t h)>
    sum_rows_at{"sum_rows_at"};

}  // namespace transformer_ops::cpu
