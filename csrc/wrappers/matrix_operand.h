// A factor of a product on CUDA: which matrix a tensor is, and how cuBLASLt reads its codes and
// their scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "kernels/gemm.h"
#include "op/checks.h"

namespace transformer_ops {

// Are the scales of blocks E8M0, or float32?
inline bool has_mx(const Tensor& scale) { return scale.scalar_type() == at::kByte; }

// A tensor of any strides as a matrix of its last dimension; its transpose costs nothing. Of pairs
// of codes it has both, of two columns.
class MatrixOperand {
 public:
  explicit MatrixOperand(Tensor tensor);
  // Of what is summed over its rows: pairs are of two of those, and are turned round, as which they
  // are multiplied.
  static MatrixOperand of_rows(const Tensor& tensor);
  MatrixOperand t() const;

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  at::ScalarType dtype() const { return tensor_.scalar_type(); }
  at::ScalarType product_dtype() const { return transformer_ops::product_dtype(tensor_); }
  cuda::Matrix matrix() const;

  bool has_codes() const { return is_codes(dtype()); }
  bool is_paired() const { return has_pairs(tensor_); }
  // Codes that are stored as themselves, or as their transpose; pairs are stored along the sum.
  MatrixOperand stored(bool as_transpose) const;
  // The values of codes, which are exact in bfloat16, also times the scales of their blocks.
  MatrixOperand decoded(const Tensor& scale) const;
  // Which codes have a scale in common, where the columns are summed over; none where cuBLASLt has
  // no such scales.
  std::optional<cuda::Scaling> scaling(const Tensor& scale) const;
  // The scales as the product reads them (kernels/gemm.h).
  Tensor stored_scales(const Tensor& scale, cuda::Scaling scaling) const;

  // For ATen.
  Tensor tensor() const;

 private:
  // Where the scale of row i and of block b of the columns is: i / height * outer_stride + b *
  // inner_stride.
  struct Places {
    int64_t inner;  // blocks of the columns
    int64_t height = 1;
    int64_t outer_stride, inner_stride;
  };

  // Of pairs, whose columns are summed over.
  Places pair_blocks(const Tensor& scale) const;
  Tensor in_tiles(const Tensor& scale, const Places& places) const;
  // Without the scale of the tensor.
  Tensor times_blocks_of_pairs(const Tensor& scale) const;
  Tensor times_blocks(const Tensor& scale) const;

  Tensor tensor_;
  int64_t rows_, cols_;
  int64_t stride_ = 0;
  bool transposed_ = false;  // as Matrix says
  bool flipped_ = false;     // of the tensor
  // Of pairs: the tensor is the transpose of what the scales are of.
  bool has_turned_blocks_ = false;
};

}  // namespace transformer_ops
