// Products of consecutive groups of rows, each with its own matrix: GroupedLinear, and the fused
// ops that contain it.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "op/typed_op.h"

namespace transformer_ops {

// The rows of each group. Rows after the last group belong to none.
class Groups {
 public:
  // Reads `splits` on the CPU. Raises if one is negative, or if their sum is more than `rows`.
  Groups(const Checks& check, const Tensor& splits, int64_t rows);

  int64_t count() const { return static_cast<int64_t>(ends_.size()) - 1; }
  int64_t begin(int64_t group) const { return ends_[group]; }
  int64_t end(int64_t group) const { return ends_[group + 1]; }
  int64_t size(int64_t group) const { return end(group) - begin(group); }
  // The number of rows of all groups.
  int64_t rows() const { return ends_.back(); }
  bool operator==(const Groups&) const = default;

 private:
  std::vector<int64_t> ends_;  // the first row of each group, and the end of the last one
};

// A tensor for each group: those of a list, or the parts of one stacked tensor.
class GroupTensors {
 public:
  // `dims`: the number of dimensions of one group's tensor.
  GroupTensors(const Tensors& list, int64_t dims)
      : list_(&list), is_stack_(list.size() == 1 && list[0].dim() == dims + 1) {}

  bool empty() const { return list_->empty(); }
  bool is_stack() const { return is_stack_; }
  c10::SymInt sym_count() const;
  int64_t count() const;
  // The size of one group's tensor.
  c10::SymInt sym_size(int64_t dim) const { return first().sym_size(is_stack_ ? dim + 1 : dim); }
  int64_t size(int64_t dim) const { return first().size(is_stack_ ? dim + 1 : dim); }
  at::ScalarType scalar_type() const { return first().scalar_type(); }
  Tensor operator[](int64_t group) const;
  const Tensors& list() const { return *list_; }

  // Raises unless each tensor has this size and dtype; an empty list passes.
  void check(const Checks& check, const char* name, const c10::SymInt& groups,
             const TensorSpec& of_one) const;

 private:
  const Tensor& first() const { return (*list_)[0]; }

  const Tensors* list_;
  bool is_stack_;
};
inline GroupTensors group_weights(const Tensors& list) { return {list, 2}; }
inline GroupTensors group_biases(const Tensors& list) { return {list, 1}; }

// Raises unless they are matrices of one size and dtype.
void check_group_weights(const Checks& check, const char* name, const GroupTensors& weights);

// The same, with this number of columns and this dtype.
void check_group_columns(const Checks& check, const char* name, const GroupTensors& weights,
                         const c10::SymInt& columns, at::ScalarType dtype);

// The matrix of one group, without the dispatcher.
Tensor weight_of(const GroupTensors& weights, int64_t group);

// The gradients of all groups: stacked, or a list.
TensorSpec group_gradients(const c10::SymInt& groups, const TensorSpec& of_one, bool is_stack);

// Raises unless `splits` holds an integer for each of `groups`.
void check_splits(const Checks& check, const Tensor& splits, const c10::SymInt& groups);

// Checks matrices that are rounded separately: the rows of each of `splits` in one tensor or,
// without splits, those of one three-dimensional tensor, or those of a list.
void check_rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits);
c10::SymInt count_rounded_groups(const Tensors& input, const Tensor* splits);
// Views of the matrices; splits are read on the CPU. `rest`: the rows of one tensor that are in no
// group, else undefined.
struct RoundedGroups {
  Tensors matrices;
  Tensor rest;
};
RoundedGroups rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits);

// The arguments of GroupedLinear. A weight is [out, in], a bias is [out], and `scales` has a number
// for each row, by which the bias is multiplied.
TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight, const GroupTensors& bias,
                                 const Tensor* scales);
TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight);

// The flags of the wanted results among (grad_input, grad_weight, grad_bias, grad_scales).
using GroupedMask = std::array<bool, 4>;

// The number of rows that a product takes for a group of `count` rows: a multiple of 16 where
// oneDNN multiplies, which compiles a kernel for each new number of rows (1.4 ms for 16-bit
// numbers). `work` is the number of multiplications for a row.
int64_t rounded_rows(int64_t count, int64_t work, at::ScalarType dtype);

// The rows from `first` on as a matrix of `rounded` rows; those past `count` are zeros. It is a
// copy unless both numbers are the same.
Tensor padded_rows_cpu(const Tensor& matrix, int64_t first, int64_t count, int64_t rounded);

// Memory for a group's rows in `out`, rounded up. It is `out` itself if the rows after the group
// are written later (up to `limit`), else temporary memory that finish() copies.
class RoundedRows {
 public:
  explicit RoundedRows(Tensor scratch) : matrix_(std::move(scratch)) {}
  RoundedRows(const Tensor& out, int64_t first, int64_t count, int64_t rounded, int64_t limit);

  const Tensor& matrix() const { return matrix_; }
  void finish() const;

 private:
  Tensor matrix_;
  Tensor own_ = {};  // the destination of temporary memory
};

// out = left weight(group), or its transpose, for the rows of each group; other rows are not
// written.
void grouped_product_cpu(const Groups& groups, const Tensor& out, const Tensor& left,
                         const GroupTensors& weights, bool transposes);

// out[group] = left^T right over the rows of each group, or added to out.
void grouped_weight_gradient_cpu(const Groups& groups, const GroupTensors& out, const Tensor& left,
                                 const Tensor& right, bool adds);

// Calls function(first, last) for ranges of groups, on several threads if that is faster: `work` is
// the cost of a row.
void parallel_over_groups(const Groups& groups, int64_t work,
                          c10::function_ref<void(int64_t, int64_t)> function);

// Sets rows that belong to no group to zero.
void zero_rest_cpu(const Groups& groups, const Tensor& matrix);

// Plain differentiable ATen calls, without sizes that depend on data.
Tensor grouped_linear_decomposed(const Tensor& input, const Tensor& splits, const Tensors& weight,
                                 const Tensors& bias = {}, const Tensor* scales = nullptr);
// The flags of whether the weights and the biases are one stacked tensor.
struct GroupedLayout {
  bool stacks_weight = true;
  bool stacks_bias = true;
};
// The gradients of input, weight, bias and scales. Gradients that are not wanted are undefined, or
// empty lists.
using GroupedBackward = std::tuple<Tensor, Tensors, Tensors, Tensor>;
GroupedBackward grouped_linear_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                   const Tensor& splits, const Tensors& weight,
                                                   const Tensors& bias, const Tensor* scales,
                                                   GroupedLayout layout, GroupedMask wanted);
// For a product without biases: the gradients of input and weight.
std::tuple<Tensor, Tensors> grouped_product_backward_decomposed(const Tensor& grad_output,
                                                                const Tensor& input,
                                                                const Tensor& splits,
                                                                const Tensors& weight,
                                                                std::array<bool, 2> wanted);
// Writes the gradients into the results of a kernel wrapper, or adds them.
void take_gradients(const Tensors& results, const Tensors& found, bool adds = false);

}  // namespace transformer_ops
