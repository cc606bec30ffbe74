// Products of consecutive runs of rows, each with a matrix of its own: GroupedLinear, and the fused
// ops that contain one.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "op/typed_op.h"

namespace transformer_ops {

// Which rows belong to which group. Those behind the last group belong to none.
class Groups {
 public:
  // Reads `splits`, on the CPU. Raises where one is negative, or all together are more than `rows`.
  Groups(const Checks& check, const Tensor& splits, int64_t rows);

  int64_t count() const { return static_cast<int64_t>(ends_.size()) - 1; }
  int64_t begin(int64_t group) const { return ends_[group]; }
  int64_t end(int64_t group) const { return ends_[group + 1]; }
  int64_t size(int64_t group) const { return end(group) - begin(group); }
  // Rows of all groups.
  int64_t rows() const { return ends_.back(); }
  bool operator==(const Groups&) const = default;

 private:
  std::vector<int64_t> ends_;  // of the groups before each, and of all
};

// Raises unless `splits` holds an integer for each of `groups`.
void check_splits(const Checks& check, const Tensor& splits, const c10::SymInt& groups);

// The matrices that are rounded each on its own, as groups of rows: those of `splits`, or without
// them those of a tensor of three dimensions.
void check_rounded_groups(const Checks& check, const Tensor& input, const Tensor* splits);
Groups rounded_groups(const Checks& check, const Tensor& input, const Tensor* splits);

// Arguments of GroupedLinear. `weight` is [groups, out, in], `bias` [groups, out], and `scales`
// has a number for each row that the bias is multiplied by.
TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const Tensor& weight, const Tensor* bias, const Tensor* scales);

// Which of (grad_input, grad_weight, grad_bias, grad_scales) are wanted.
using GroupedMask = std::array<bool, 4>;

// Rows `count` of a group as products take them: oneDNN compiles a kernel for each new number of
// rows, 1.4 ms the first time, so those of 16-bit numbers are rounded up to a multiple of 16.
int64_t rounded_rows(int64_t count, at::ScalarType dtype);

// The rows from `first` on as a matrix of `rounded` rows; those past `count` are zeros. A copy,
// unless both are the same.
Tensor padded_rows_cpu(const Tensor& matrix, int64_t first, int64_t count, int64_t rounded);

// Memory for the rows of a group in `out`, rounded: in place where what lies beyond them is written
// later, which is up to `limit`; else in scratch, which finish() copies.
class RoundedRows {
 public:
  explicit RoundedRows(Tensor scratch) : matrix_(std::move(scratch)) {}
  RoundedRows(const Tensor& out, int64_t first, int64_t count, int64_t rounded, int64_t limit);

  const Tensor& matrix() const { return matrix_; }
  void finish() const;

 private:
  Tensor matrix_;
  Tensor own_ = {};  // where scratch goes
};

// out = left right(group), for the rows of each group; other rows are not written. `right` is
// [groups, inner, columns].
void grouped_product_cpu(const Groups& groups, const Tensor& out, const Tensor& left,
                         const Tensor& right);

// out[group] = left^T right over the rows of each group, or added to what is there.
void grouped_weight_gradient_cpu(const Groups& groups, const Tensor& out, const Tensor& left,
                                 const Tensor& right, bool adds);

// Calls function(first, last) for ranges of groups, in several threads where that pays: `work` is
// what a row costs.
void parallel_over_groups(const Groups& groups, int64_t work,
                          c10::function_ref<void(int64_t, int64_t)> function);

// Rows that belong to no group become zeros.
void zero_rest_cpu(const Groups& groups, const Tensor& matrix);

// Plain differentiable ATen calls without a size that depends on data.
Tensor grouped_linear_unfused(const Tensor& input, const Tensor& splits, const Tensor& weight,
                              const Tensor* bias, const Tensor* scales);
using GroupedBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
// Gradients that are not wanted are undefined.
GroupedBackward grouped_linear_backward_unfused(const Tensor& grad_output, const Tensor* input,
                                                const Tensor& splits, const Tensor* weight,
                                                const Tensor* bias, const Tensor* scales,
                                                GroupedMask wanted);

}  // namespace transformer_ops
