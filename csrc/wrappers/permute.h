// Rows that are copied to several positions and back, such as the rows of tokens to their experts.
//
// positions [..., k], int32: the positions of the k copies of a row; -1 for a copy that is dropped.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// Raises unless `positions` holds int32 and its leading dimensions are `rows`.
void check_positions(const Checks& check, const Tensor& positions, c10::SymIntArrayRef rows);

// The inverse of positions, on the CPU. Raises if a position is out of range, or if two are equal.
class Places {
 public:
  Places(const Checks& check, const Tensor& positions);

  int64_t count() const { return static_cast<int64_t>(copies_.size()); }
  // The number of the copy at this position; -1 if there is none.
  int32_t copy_at(int64_t place) const { return copies_[place]; }

 private:
  std::vector<int32_t> copies_;
};

// [..., h] -> [positions, h]: output[positions[r, i]] = input[r]; rows that receive nothing are
// zero.
TensorSpec spread_output(const Tensor& input, const Tensor& positions);
void spread_rows_cpu(const Tensor& input, const Places& places, int64_t copies,
                     const Tensor& output);
// The rows of `output` are the positions from `first` on; `input` is a matrix.
void copy_rows_cpu(const Tensor& input, const Places& places, int64_t copies, int64_t first,
                   const Tensor& output);
Tensor spread_rows_decomposed(const Tensor& input, const Tensor& positions);

// [positions, h] -> [..., h]: output[r] is the sum over i of input[positions[r, i]], in this order,
// in the accumulate dtype.
TensorSpec gathered_output(const Checks& check, const char* name, const Tensor& input,
                           const Tensor& positions);
void sum_rows_cpu(const Checks& check, const Tensor& input, const Tensor& positions,
                  const Tensor& output);
Tensor sum_rows_decomposed(const Tensor& input, const Tensor& positions);

// [positions] -> the shape of `positions`: output[r, i] = values[positions[r, i]], or 0 if the
// position is -1.
void take_values_cpu(const Checks& check, const Tensor& values, const Tensor& positions,
                     const Tensor& output);
Tensor take_values_decomposed(const Tensor& values, const Tensor& positions);

// The results of Dispatch: rows, splits, permuted probabilities and positions. Raises if its
// arguments do not fit.
TensorSpecs dispatch_outputs(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                             const Tensor& probs, int64_t num_experts, int64_t first_expert,
                             int64_t local_experts);
using Dispatched = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Dispatched dispatch_decomposed(const Tensor& input, const Tensor& expert_ids, const Tensor& probs,
                               int64_t num_experts, int64_t first_expert, int64_t local_experts);

// The copies sorted by group, in their order within a group: int32 positions like `ids`, and the
// number of copies of each group. An id of -1, or one outside of `groups`, is in no group and is
// dropped.
struct Sorted {
  Tensor positions;
  Tensor splits;  // int64
};
struct GroupRange {
  int64_t first, count;
};
// `known`: all ids must be less than this number.
void sort_by_group_cpu(const Checks& check, const Tensor& ids, int64_t known, GroupRange groups,
                       const Tensor& splits, const Tensor& positions);
Sorted sort_by_group_decomposed(const Tensor& ids, GroupRange groups);

}  // namespace transformer_ops
