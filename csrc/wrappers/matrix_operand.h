// An operand of a product on CUDA: its matrix, and the layouts of codes and scales that cuBLASLt
// reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "kernels/gemm.h"
#include "op/checks.h"

namespace transformer_ops {

// Are the block scales E8M0, not float32?
inline bool has_mx(const Tensor& scale) { return scale.scalar_type() == at::kByte; }

// A tensor of any strides as a matrix of its last dimension; transposing it is free. A pair of
// codes counts as its two numbers, of two columns.
class MatrixOperand {
 public:
  explicit MatrixOperand(Tensor tensor);
  // An operand that is summed over its rows. Pairs are codes of two rows; they are transposed,
  // because they are multiplied along the sum.
  static MatrixOperand of_rows(const Tensor& tensor);
  MatrixOperand t() const;

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  at::ScalarType dtype() const { return tensor_.scalar_type(); }
  at::ScalarType product_dtype() const { return transformer_ops::product_dtype(tensor_); }
  cuda::Matrix matrix() const;

  bool has_codes() const { return is_codes(dtype()); }
  bool is_paired() const { return has_pairs(tensor_); }
  // Codes that are stored as the matrix, or as its transpose; pairs are stored along the sum.
  MatrixOperand stored(bool as_transpose) const;
  // The values of codes times their block scales, which are exact in bfloat16.
  MatrixOperand decoded(const Tensor& scale) const;
  // The blocks of codes that share a scale, if the columns are summed over; none if cuBLASLt has no
  // such scales.
  std::optional<cuda::Scaling> scaling(const Tensor& scale) const;
  // The scales in the layout of the product (kernels/gemm.h).
  Tensor stored_scales(const Tensor& scale, cuda::Scaling scaling) const;

  // The tensor for ATen.
  Tensor tensor() const;

 private:
  // The scale of row i and of block b of the columns is at i / height * outer_stride + b *
  // inner_stride.
  struct Places {
    int64_t inner;  // the number of blocks of the columns
    int64_t height = 1;
    int64_t outer_stride, inner_stride;
  };

  // The layout of the scales of pairs, whose columns are summed over.
  Places pair_blocks(const Tensor& scale) const;
  Tensor in_tiles(const Tensor& scale, const Places& places) const;
  // Does not apply the scale of the tensor.
  Tensor times_blocks_of_pairs(const Tensor& scale) const;
  Tensor times_blocks(const Tensor& scale) const;

  Tensor tensor_;
  int64_t rows_, cols_;
  int64_t stride_ = 0;
  bool transposed_ = false;  // see Matrix
  bool flipped_ = false;     // the matrix is the transpose of the tensor
  // For pairs: the tensor is the transpose of the one that the scales belong to.
  bool has_turned_blocks_ = false;
};

}  // namespace transformer_ops
