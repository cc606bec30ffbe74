// Codes of FP8 and FP4 as operands of a product.
#pragma once

#include <optional>

#include "op/checks.h"

namespace transformer_ops {

// The numbers in bfloat16, which is exact, that codes with scales of blocks stand for: of 128 rows,
// columns or both, by float32; of 32 rows or columns, by E8M0.
Tensor times_blocks(const Tensor& codes, const Tensor& scale);

// The same of pairs of codes of FP4 (NVFP4), of two rows or of two columns: without the scale of
// the tensor, which is the float32 at the end of `scale`.
Tensor times_blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows);
Tensor scale_of_tensor(const Tensor& scale);

// The blocks of such codes along the sum, `inner`, and across it, of which each is `height` high:
// 1 or 16. None where `scale` is not of them.
struct PairBlocks {
  c10::SymInt outer, inner;
  int64_t height;
};
std::optional<PairBlocks> blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows);

}  // namespace transformer_ops
