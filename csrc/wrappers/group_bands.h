// Groups of rows on a device. The host does not read their sizes, so no size here depends on them.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// The end of each group.
Tensor group_ends(const Tensor& splits, const c10::SymInt& rows);
Tensor group_sizes(const Tensor& ends);
// The same in bands of `height` rows; each group starts a band.
Tensor band_ends(const Tensor& sizes, int64_t height);

// Rows in bands of `height` rows. Each group starts a band, and its last band may be padded. If
// sizes are negative or exceed all rows, each row is still in one group or in none.
class GroupBands {
 public:
  GroupBands(const Tensor& splits, const c10::SymInt& rows, int64_t height);

  // Lays out a matrix in bands, one below the other; padding is zero.
  Tensor lay_out(const Tensor& matrix) const;
  // Restores the order of the rows; those that are in no group are zeros.
  Tensor take_back(const Tensor& bands) const;
  // The same, but rows that fill no whole band are taken from `others`.
  Tensor take_back_whole(const Tensor& bands, const Tensor& others) const;

  // The largest magnitude of each group, given that of each band; 0 for an empty group.
  Tensor largest(const Tensor& of_bands) const;
  // The number of each band's group; `otherwise` for bands of no group.
  Tensor spread(const Tensor& of_groups, double otherwise) const;
  // [groups]: does the group have rows?
  Tensor has_rows() const { return sizes_ > 0; }

 private:
  Tensor keep_members(const Tensor& matrix) const;

  c10::SymInt groups_;
  int64_t height_;
  // for each group, and one more for no group: rows, first row, first row of its bands
  Tensor sizes_, begins_, places_;
  Tensor group_of_row_, group_of_band_;  // the number of groups stands for no group
  Tensor source_, target_;  // for each row of the bands its row in the matrix, and vice versa
};

}  // namespace transformer_ops
