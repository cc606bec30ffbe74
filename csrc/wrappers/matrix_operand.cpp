#include "wrappers/matrix_operand.h"

#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include "kernels/quantize.h"
#include "kernels/transpose.h"
#include "op/codes.h"
#include "wrappers/cuda.h"
#include "wrappers/quantized.h"

namespace transformer_ops {
namespace {

using cuda::Matrix;
using cuda::Scaling;

constexpr int64_t kBlock = 128;

bool fits(int64_t outer, int64_t inner, int64_t rows, int64_t cols) {
  return (inner == 1 || cols == 1) && (outer >= cols || rows == 1);
}

// The numbers of blocks along the rows and the columns of the tensor.
std::pair<int64_t, int64_t> blocks_of(const Tensor& scale) {
  const auto sizes = scale.sizes();
  return {c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()};
}

// The transpose [cols, rows] of a matrix of bytes, whose rows are `stride` apart.
Tensor turned(const Tensor& bytes, int64_t stride, int64_t rows, int64_t cols) {
  const Tensor result = empty({cols, rows}, bytes.scalar_type(), bytes.device());
  cuda::transpose(cuda::stream_of(result), /*bytes=*/1, cuda::read(bytes), stride,
                  cuda::write(result), rows, rows, cols);
  return result;
}

Tensor decoded_blocks(const kernel::Format& format, const Tensor& codes, const Tensor& scale,
                      at::IntArrayRef sizes) {
  const Tensor values = empty(sizes, at::kBFloat16, codes.device());
  const FlatRows shape(sizes);
  cuda::dequantize(cuda::stream_of(values), format, kernel_dtype(values), cuda::read(codes),
                   cuda::read(scale), /*decoded_tensor_scale=*/nullptr, cuda::write(values),
                   shape.rows, shape.h);
  return values;
}

}  // namespace

MatrixOperand::MatrixOperand(Tensor tensor) : tensor_(std::move(tensor)), cols_(tensor_.size(-1)) {
  rows_ = c10::multiply_integers(tensor_.sizes().begin(), tensor_.sizes().end() - 1);
  if (is_paired()) {
    tensor_ = contiguous(tensor_);
    stride_ = cols_ = 2 * cols_;
  } else if (tensor_.is_contiguous()) {
    stride_ = cols_;
  } else if (tensor_.dim() == 2 && fits(tensor_.stride(0), tensor_.stride(1), rows_, cols_)) {
    stride_ = tensor_.stride(0);
  } else if (tensor_.dim() == 2 && fits(tensor_.stride(1), tensor_.stride(0), cols_, rows_)) {
    stride_ = tensor_.stride(1);
    transposed_ = true;
  } else {
    tensor_ = contiguous(tensor_);
    stride_ = cols_;
  }
}

MatrixOperand MatrixOperand::of_rows(const Tensor& tensor) {
  if (!has_pairs(tensor)) return MatrixOperand(tensor);
  const Tensor pairs = contiguous(tensor);
  const int64_t h = pairs.size(-1);
  const int64_t rows = c10::multiply_integers(pairs.sizes().slice(0, pairs.dim() - 1));
  MatrixOperand result(turned(pairs, h, rows, h));
  result.has_turned_blocks_ = true;
  return result.t();
}

MatrixOperand MatrixOperand::t() const {
  MatrixOperand result = *this;
  std::swap(result.rows_, result.cols_);
  result.transposed_ = !transposed_;
  result.flipped_ = !flipped_;
  return result;
}

Matrix MatrixOperand::matrix() const { return {cuda::read(tensor_), stride_, transposed_}; }

MatrixOperand MatrixOperand::stored(bool as_transpose) const {
  if (transposed_ == as_transpose || is_paired()) return *this;
  const int64_t rows = transposed_ ? cols_ : rows_, cols = transposed_ ? rows_ : cols_;
  const MatrixOperand copy(turned(tensor_, stride_, rows, cols));
  return as_transpose ? copy.t() : copy;
}

MatrixOperand MatrixOperand::decoded(const Tensor& scale) const {
  if (!has_codes()) return *this;
  const MatrixOperand values(is_paired()           ? times_blocks_of_pairs(scale)
                             : is_of_blocks(scale) ? times_blocks(scale)
                                                   : tensor_.to(at::kBFloat16));
  return flipped_ ? values.t() : values;
}

std::optional<Scaling> MatrixOperand::scaling(const Tensor& scale) const {
  if (is_paired()) return Scaling::Vectors16;
  const auto [down, across] = blocks_of(scale);
  const int64_t outer = flipped_ ? across : down, inner = flipped_ ? down : across;
  const bool is_mx = has_mx(scale);
  if (inner * (is_mx ? 32 : kBlock) != cols_) return std::nullopt;
  if (outer == rows_) return is_mx ? Scaling::Vectors32 : Scaling::Vectors128;
  if (is_mx) return std::nullopt;
  return outer == (rows_ + kBlock - 1) / kBlock ? std::optional(Scaling::Blocks128) : std::nullopt;
}

Tensor MatrixOperand::stored_scales(const Tensor& scale, Scaling scaling) const {
  if (scaling == Scaling::Vectors16) return in_tiles(scale.contiguous(), pair_blocks(scale));
  const auto [down, across] = blocks_of(scale);
  if (scaling == Scaling::Vectors32) {
    return in_tiles(scale.contiguous(), {.inner = cols_ / 32,
                                         .outer_stride = flipped_ ? 1 : across,
                                         .inner_stride = flipped_ ? across : 1});
  }
  // Scales of one row of blocks are adjacent in memory; with 128 x 128 blocks, those of a column
  // are.
  const bool is_2d = scaling == Scaling::Blocks128, turns = is_2d == flipped_;
  const int64_t count = turns ? down : across, lines = turns ? across : down;
  const int64_t stride = is_2d ? (count + 3) / 4 * 4 : count;
  const Tensor numbers = scale.contiguous();
  if (!turns && stride == count) return numbers;
  const Tensor out = stride == count ? empty({lines, stride}, at::kFloat, numbers.device())
                                     : at::zeros({lines, stride}, numbers.options());
  if (turns) {
    cuda::transpose(cuda::stream_of(out), /*bytes=*/4, cuda::read(numbers), across,
                    cuda::write(out), stride, down, across);
  } else {
    out.narrow(1, 0, count).copy_(numbers.view({lines, count}));
  }
  return out;
}

Tensor MatrixOperand::tensor() const {
  const Tensor as_stored = flipped_ ? tensor_.view({cols_, rows_}) : tensor_.view({rows_, cols_});
  return flipped_ ? as_stored.t() : as_stored;
}

MatrixOperand::Places MatrixOperand::pair_blocks(const Tensor& scale) const {
  const Tensor along_rows = has_turned_blocks_ ? tensor_.t() : tensor_;
  const PairBlocks blocks = *blocks_of_pairs(along_rows, scale, has_turned_blocks_);
  const int64_t inner = blocks.inner.expect_int(), outer = blocks.outer.expect_int();
  return {.inner = inner,
          .height = blocks.height,
          .outer_stride = has_turned_blocks_ ? 1 : inner,
          .inner_stride = has_turned_blocks_ ? outer : 1};
}

Tensor MatrixOperand::in_tiles(const Tensor& scale, const Places& places) const {
  const int64_t tiles = (rows_ + 127) / 128 * ((places.inner + 3) / 4);
  const Tensor out = empty({tiles * 512}, at::kByte, scale.device());
  cuda::tile_scales(cuda::stream_of(out), cuda::read(scale), places.height, places.outer_stride,
                    places.inner_stride, cuda::write(out), rows_, places.inner);
  return out;
}

Tensor MatrixOperand::times_blocks_of_pairs(const Tensor& scale) const {
  const Places places = pair_blocks(scale);
  const int64_t across = places.inner_stride;
  const Tensor bytes = scale.contiguous();
  const Tensor numbers = has_turned_blocks_ ? turned(bytes, across, places.inner, across) : bytes;
  c10::DimVector sizes(tensor_.sizes());
  sizes.back() *= 2;
  return decoded_blocks(*kernel::find_format(places.height == 1 ? "nvfp4" : "nvfp4 16x16"), tensor_,
                        numbers, sizes);
}

Tensor MatrixOperand::times_blocks(const Tensor& scale) const {
  const Tensor codes = contiguous(tensor_), numbers = scale.contiguous();
  return decoded_blocks(*find_block_format(codes, numbers), codes, numbers, codes.sizes());
}

}  // namespace transformer_ops
