// Codes of FP8 as operands of a product.
#pragma once

#include "op/checks.h"

namespace transformer_ops {

// The numbers in bfloat16, which is exact, that codes with scales of blocks stand for: of 128 rows,
// columns or both, by float32; of 32 rows or columns, by E8M0.
Tensor times_blocks(const Tensor& codes, const Tensor& scale);

}  // namespace transformer_ops
