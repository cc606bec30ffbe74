#include "op/codes.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/accumulate.h>

#include <limits>
#include <vector>

namespace transformer_ops {
namespace {

constexpr int64_t kPairBlock = 16, kTensorScaleBytes = 4;

Tensor values_of_fp4(const Tensor& codes) {
  std::vector<float> values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (size_t code = 0; code < 8; ++code) values.push_back(-values[code]);
  return at::tensor(values, at::kFloat).to(codes.device()).index({codes.to(at::kLong)});
}

}  // namespace

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

Tensor times_blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows) {
  const int64_t along = of_rows ? 0 : -1;
  const PairBlocks blocks = *blocks_of_pairs(pairs, scale, of_rows);
  const int64_t inner = blocks.inner.expect_int(), outer = blocks.outer.expect_int();
  // Unpacks both codes of a pair into a new dimension next to that of the pairs.
  const int64_t rows = c10::multiply_integers(pairs.sizes().slice(0, pairs.dim() - 1));
  const Tensor matrix = pairs.reshape({rows, pairs.size(-1)});
  const Tensor both = at::stack({matrix.bitwise_and(15), matrix.bitwise_right_shift(4)},
                                /*dim=*/of_rows ? 1 : 2);
  const Tensor values = values_of_fp4(of_rows ? both.flatten(0, 1) : both.flatten(1, 2));
  Tensor each = scale.narrow(0, 0, inner * outer).contiguous().view(at::kFloat8_e4m3fn);
  each = each.to(at::kFloat)
             .view(of_rows ? at::IntArrayRef{inner, outer} : at::IntArrayRef{outer, inner});
  each = each.repeat_interleave(kPairBlock, along).narrow(along, 0, values.size(along));
  if (blocks.height != 1) {
    const int64_t across = of_rows ? 1 : 0;
    each = each.repeat_interleave(blocks.height, across).narrow(across, 0, values.size(across));
  }
  c10::DimVector sizes(pairs.sizes());
  sizes[of_rows ? 0 : sizes.size() - 1] *= 2;
  return (values * each).to(at::kBFloat16).view(sizes);
}

Tensor scale_of_tensor(const Tensor& scale) {
  // The clone gives the bytes memory of their own, because a view as float needs alignment.
  const int64_t end = scale.size(0) - kTensorScaleBytes;
  return scale.narrow(0, end, kTensorScaleBytes).clone().view(at::kFloat).squeeze(0);
}

std::optional<PairBlocks> blocks_of_pairs(const Tensor& pairs, const Tensor& scale, bool of_rows) {
  if (scale.dim() != 1 || scale.scalar_type() != at::kByte || pairs.dim() < 1) return std::nullopt;
  const auto sizes = pairs.sym_sizes();
  c10::SymInt rows = 1;
  for (const auto& size : sizes.slice(0, sizes.size() - 1)) rows = rows * size;
  const c10::SymInt along = of_rows ? rows : sizes.back(), across = of_rows ? sizes.back() : rows;
  const c10::SymInt inner = (along + (kPairBlock / 2 - 1)) / (kPairBlock / 2);
  for (const int64_t height : {int64_t{1}, kPairBlock}) {
    const c10::SymInt outer = (across + (height - 1)) / height;
    if (scale.sym_size(0) == outer * inner + kTensorScaleBytes) {
      return PairBlocks{outer, inner, height};
    }
  }
  return std::nullopt;
}

}  // namespace transformer_ops
