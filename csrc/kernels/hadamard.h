// The Hadamard transform of 16 rows. It spreads outliers before the operands of a product over
// these rows are rounded.
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::kernel {
namespace {

constexpr int64_t kHadamardRows = 16;
// The signs of TransformerEngine's recipe. Which rows are negated is arbitrary, but must be the
// same for both operands.
constexpr float kHadamardSigns[kHadamardRows] = {1,  1,  1,  -1, 1,  -1, -1, -1,
                                                 -1, -1, -1, 1,  -1, 1,  -1, -1};

}  // namespace
}  // namespace transformer_ops::kernel

namespace transformer_ops::cpu {

// out[i] = sum over j of (-1)^(number of ones that i and j share) kHadamardSigns[j] x[j] / 4, for
// rows i and j of each 16. Remaining rows are copied. `out` holds acc numbers.
inline const Kernel<void(DType, const void* x, void* out, int64_t rows, int64_t h)> hadamard_rows{
    "hadamard_rows"};

}  // namespace transformer_ops::cpu
