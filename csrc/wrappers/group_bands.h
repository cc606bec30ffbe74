// Rows of groups on a device, whose sizes no host reads: no size here depends on them, either.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// Where each group ends.
Tensor group_ends(const Tensor& splits, const c10::SymInt& rows);
Tensor group_sizes(const Tensor& ends);
// The same in bands of `height` rows, of which each group begins one.
Tensor band_ends(const Tensor& sizes, int64_t height);

// Bands of `height` rows, each of one group: that begins with a band, and its last one may be
// filled up. Where sizes are negative, or more than all rows, rows are of some group or of none.
class GroupBands {
 public:
  GroupBands(const Tensor& splits, const c10::SymInt& rows, int64_t height);

  // Of a matrix, its bands below each other; what fills them up is zero.
  Tensor lay_out(const Tensor& matrix) const;
  // The rows in their own order; those of no group are zeros.
  Tensor take_back(const Tensor& bands) const;
  // The same, but those that fill no band are of `others`.
  Tensor take_back_whole(const Tensor& bands, const Tensor& others) const;

  // Of a magnitude for each band, the largest of each group; 0 of nothing.
  Tensor largest(const Tensor& of_bands) const;
  // For each band what its group has; for bands of none, `otherwise`.
  Tensor spread(const Tensor& of_groups, double otherwise) const;
  // [groups]: does it have rows?
  Tensor has_rows() const { return sizes_ > 0; }

 private:
  Tensor keep_members(const Tensor& matrix) const;

  c10::SymInt groups_;
  int64_t height_;
  // Of each group, and of none behind them: rows, the first row, the first row of its bands.
  Tensor sizes_, begins_, places_;
  Tensor group_of_row_, group_of_band_;  // the number of groups stands for none
  Tensor source_, target_;               // of each row of bands in the matrix, and back
};

}  // namespace transformer_ops
