// FP8 and FP4 codes as operands of a product.
#pragma once

#include <optional>

#include "op/checks.h"

namespace transformer_ops {

// Decodes FP8 codes with block scales to bfloat16, which is exact. A float32 scale is for 128 rows,
// columns or both; an E8M0 scale is for 32 rows or columns.
Tensor times_blocks(const Tensor& codes, const Tensor& scale);

// Decodes pairs of FP4 codes (NVFP4) along rows or columns, without the scale of the whole tensor.
// That scale is the float32 at the end of `scale`.
Tensor times_blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows);
Tensor scale_of_tensor(const Tensor& scale);

// The block grid of such codes along the sum (`inner`) and across it (`outer`); a block is `height`
// (1 or 16) high. Returns none if `scale` has another layout.
struct PairBlocks {
  c10::SymInt outer, inner;
  int64_t height;
};
std::optional<PairBlocks> blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows);

}  // namespace transformer_ops
