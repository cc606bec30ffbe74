#include "op/codes.h"

#include <c10/util/accumulate.h>

#include <limits>

namespace transformer_ops {

Tensor times_blocks(const Tensor& codes, const Tensor& scale) {
  const int64_t h = codes.size(-1), across = scale.size(-1);
  const int64_t rows = c10::multiply_integers(codes.sizes().slice(0, codes.dim() - 1));
  const int64_t down = c10::multiply_integers(scale.sizes().slice(0, scale.dim() - 1));
  const bool is_mx = scale.scalar_type() == at::kByte;
  const int64_t block = is_mx ? 32 : 128;
  Tensor each = scale.reshape({down, across});
  if (is_mx) {
    const Tensor powers = (each.to(at::kDouble) - 127).exp2().to(at::kFloat);
    each = powers.masked_fill(each == 255, std::numeric_limits<float>::quiet_NaN());
  }
  if (down != rows) each = each.repeat_interleave(block, 0).narrow(0, 0, rows);
  if (across != h) each = each.repeat_interleave(block, 1).narrow(1, 0, h);
  return (codes.to(at::kFloat) * each.reshape(codes.sizes())).to(at::kBFloat16);
}

}  // namespace transformer_ops
