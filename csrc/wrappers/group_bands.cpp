#include "wrappers/group_bands.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

namespace transformer_ops {
namespace {

// The index of the range that contains each of 0, 1...; the ranges are consecutive, with these
// ends.
Tensor range_of(const Tensor& index, const Tensor& ends) {
  return at::bucketize(index, ends, /*out_int32=*/false, /*right=*/true);
}

Tensor count_to(const c10::SymInt& end, const Tensor& like) {
  return at::arange(at::Scalar(end), like.options());
}

// Appends a number for what is in no group.
Tensor with_none(const Tensor& of_groups, double none) {
  return at::constant_pad_nd(of_groups, {0, 1}, none);
}

Tensor rows_at(const Tensor& matrix, const Tensor& places) {
  return matrix.index_select(0, places);
}

}  // namespace

Tensor group_ends(const Tensor& splits, const c10::SymInt& rows) {
  const at::Scalar most(rows);
  return splits.to(at::kLong).clamp(0, most).cumsum(0).clamp_max(most);
}

Tensor group_sizes(const Tensor& ends) {
  return ends - at::constant_pad_nd(ends, {1, 0}).slice(0, 0, -1);
}

Tensor band_ends(const Tensor& sizes, int64_t height) {
  return (sizes + (height - 1)).floor_divide(height).cumsum(0);
}

GroupBands::GroupBands(const Tensor& splits, const c10::SymInt& rows, int64_t height)
    : groups_(splits.sym_size(0)), height_(height) {
  const Tensor ends = group_ends(splits, rows);
  begins_ = at::constant_pad_nd(ends, {1, 0});
  sizes_ = group_sizes(ends);
  const Tensor row = count_to(rows, ends);
  group_of_row_ = range_of(row, ends);
  if (height == 1) {
    group_of_band_ = group_of_row_;
    return;
  }
  const Tensor last_bands = band_ends(sizes_, height);
  places_ = at::constant_pad_nd(last_bands * height, {1, 0});
  // Each group needs less than one band of additional rows.
  const c10::SymInt count = (rows + groups_ * (height - 1) + (height - 1)) / height;
  group_of_band_ = range_of(count_to(count, ends), last_bands);
  const Tensor group = group_of_band_.unsqueeze(-1).expand_symint({count, height}).flatten();
  const Tensor place = count_to(count * height, ends) - places_.index({group});
  // The index after the last row stands for a row of zeros.
  source_ = at::where(place < with_none(sizes_, 0).index({group}), begins_.index({group}) + place,
                      at::Scalar(rows));
  target_ = row - begins_.index({group_of_row_}) + places_.index({group_of_row_});
  target_ = at::where(group_of_row_ < at::Scalar(groups_), target_, 0);
}

Tensor GroupBands::lay_out(const Tensor& matrix) const {
  if (height_ == 1) return matrix;
  return rows_at(at::constant_pad_nd(matrix, {0, 0, 0, 1}), source_);
}

Tensor GroupBands::keep_members(const Tensor& matrix) const {
  return at::where((group_of_row_ < at::Scalar(groups_)).unsqueeze(-1), matrix, 0);
}

Tensor GroupBands::take_back(const Tensor& bands) const {
  return keep_members(height_ == 1 ? bands : rows_at(bands, target_));
}

Tensor GroupBands::take_back_whole(const Tensor& bands, const Tensor& others) const {
  const Tensor in_whole = sizes_.floor_divide(height_) * height_ + begins_.slice(0, 0, -1);
  const Tensor row = count_to(others.sym_size(0), sizes_);
  const Tensor is_whole = row < with_none(in_whole, 0).index({group_of_row_});
  return keep_members(at::where(is_whole.unsqueeze(-1), rows_at(bands, target_), others));
}

Tensor GroupBands::largest(const Tensor& of_bands) const {
  // The bits have the same order as the magnitudes, and NaN is above all.
  const Tensor bits = of_bands.view(at::kInt).bitwise_and(0x7fffffff);
  const Tensor none = at::zeros_symint({groups_ + 1}, bits.options());
  return none.scatter_reduce(0, group_of_band_, bits, "amax")
      .slice_symint(0, 0, groups_)
      .view(at::kFloat);
}

Tensor GroupBands::spread(const Tensor& of_groups, double otherwise) const {
  return with_none(of_groups, otherwise).index({group_of_band_});
}

}  // namespace transformer_ops
