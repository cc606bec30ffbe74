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

// A tensor for each group: those of a list, or the parts of one stacked tensor.
class GroupTensors {
 public:
  // `dims`: of the tensor of one group.
  GroupTensors(const Tensors& list, int64_t dims)
      : list_(&list), is_stack_(list.size() == 1 && list[0].dim() == dims + 1) {}

  bool empty() const { return list_->empty(); }
  bool is_stack() const { return is_stack_; }
  c10::SymInt sym_count() const;
  int64_t count() const;
  // Of the tensor of one group.
  c10::SymInt sym_size(int64_t dim) const { return first().sym_size(is_stack_ ? dim + 1 : dim); }
  int64_t size(int64_t dim) const { return first().size(is_stack_ ? dim + 1 : dim); }
  at::ScalarType scalar_type() const { return first().scalar_type(); }
  Tensor operator[](int64_t group) const;
  const Tensors& list() const { return *list_; }

  // Raises unless each is of this size and dtype; an empty list is none.
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

// The same with so many columns, in this dtype.
void check_group_columns(const Checks& check, const char* name, const GroupTensors& weights,
                         const c10::SymInt& columns, at::ScalarType dtype);

// That of one group, without the dispatcher.
Tensor weight_of(const GroupTensors& weights, int64_t group);

// The gradients of tensors for each group: stacked, or a list.
TensorSpec group_gradients(const c10::SymInt& groups, const TensorSpec& of_one, bool is_stack);

// Raises unless `splits` holds an integer for each of `groups`.
void check_splits(const Checks& check, const Tensor& splits, const c10::SymInt& groups);

// The matrices that are rounded each on its own: the rows of each of `splits` in one tensor, or
// without them those of one tensor of three dimensions, or those of a list, which may be of one.
void check_rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits);
c10::SymInt count_rounded_groups(const Tensors& input, const Tensor* splits);
// Views of them; splits are read, on the CPU. `rest`: of one tensor, the rows in no group; else
// undefined.
struct RoundedGroups {
  Tensors matrices;
  Tensor rest;
};
RoundedGroups rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits);

// Arguments of GroupedLinear. A weight is [out, in], a bias [out], and `scales` has a number for
// each row that the bias is multiplied by.
TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight, const GroupTensors& bias,
                                 const Tensor* scales);
TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight);

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

// out = left weight(group), or its transpose, for the rows of each group; other rows are not
// written.
void grouped_product_cpu(const Groups& groups, const Tensor& out, const Tensor& left,
                         const GroupTensors& weights, bool transposes);

// out[group] = left^T right over the rows of each group, or added to what is there.
void grouped_weight_gradient_cpu(const Groups& groups, const GroupTensors& out, const Tensor& left,
                                 const Tensor& right, bool adds);

// Calls function(first, last) for ranges of groups, in several threads where that pays: `work` is
// what a row costs.
void parallel_over_groups(const Groups& groups, int64_t work,
                          c10::function_ref<void(int64_t, int64_t)> function);

// Rows that belong to no group become zeros.
void zero_rest_cpu(const Groups& groups, const Tensor& matrix);

// Plain differentiable ATen calls without a size that depends on data.
Tensor grouped_linear_decomposed(const Tensor& input, const Tensor& splits, const Tensors& weight,
                                 const Tensors& bias = {}, const Tensor* scales = nullptr);
// Which of the weights and the biases are one stacked tensor.
struct GroupedLayout {
  bool stacks_weight = true;
  bool stacks_bias = true;
};
// Gradients of input, weight, bias and scales. Those that are not wanted are undefined, or empty
// lists.
using GroupedBackward = std::tuple<Tensor, Tensors, Tensors, Tensor>;
GroupedBackward grouped_linear_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                   const Tensor& splits, const Tensors& weight,
                                                   const Tensors& bias, const Tensor* scales,
                                                   GroupedLayout layout, GroupedMask wanted);
// Of a product without biases: gradients of input and weight.
std::tuple<Tensor, Tensors> grouped_product_backward_decomposed(const Tensor& grad_output,
                                                                const Tensor& input,
                                                                const Tensor& splits,
                                                                const Tensors& weight,
                                                                std::array<bool, 2> wanted);
// Into the results of a body: the same, or added to what is there.
void take_gradients(const Tensors& results, const Tensors& found, bool adds = false);

}  // namespace transformer_ops
