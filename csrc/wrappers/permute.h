// Rows that go to several places, and come back: those of tokens, to their experts.
//
// positions [..., k], int32: where the k copies of a row are; -1 for one that is nowhere.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// Raises unless `positions` holds int32 and its leading dimensions are `rows`.
void check_positions(const Checks& check, const Tensor& positions, c10::SymIntArrayRef rows);

// Positions on the CPU, from the other side. Raises for one that is no place, and for two that are
// the same place.
class Places {
 public:
  Places(const Checks& check, const Tensor& positions);

  int64_t count() const { return static_cast<int64_t>(copies_.size()); }
  // The number of the copy that is there; -1 for none.
  int32_t copy_at(int64_t place) const { return copies_[place]; }

 private:
  std::vector<int32_t> copies_;
};

// [..., h] -> [places, h]: output[positions[r, i]] = input[r]; rows that nothing comes to are zero.
TensorSpec spread_output(const Tensor& input, const Tensor& positions);
void spread_rows_cpu(const Tensor& input, const Places& places, int64_t copies,
                     const Tensor& output);
// The rows of `output` are the places from `first` on; `input` is a matrix.
void copy_rows_cpu(const Tensor& input, const Places& places, int64_t copies, int64_t first,
                   const Tensor& output);
Tensor spread_rows_decomposed(const Tensor& input, const Tensor& positions);

// [places, h] -> [..., h]: output[r] is the sum over i of input[positions[r, i]], in this order, in
// the accumulate dtype.
TensorSpec gathered_output(const Checks& check, const char* name, const Tensor& input,
                           const Tensor& positions);
void sum_rows_cpu(const Checks& check, const Tensor& input, const Tensor& positions,
                  const Tensor& output);
Tensor sum_rows_decomposed(const Tensor& input, const Tensor& positions);

// [places] -> the shape of `positions`: output[r, i] = values[positions[r, i]], 0 for a position
// of -1.
void take_values_cpu(const Checks& check, const Tensor& values, const Tensor& positions,
                     const Tensor& output);
Tensor take_values_decomposed(const Tensor& values, const Tensor& positions);

// What Dispatch gives: rows, splits, permuted probabilities and positions. Raises where its
// arguments do not fit.
TensorSpecs dispatch_outputs(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                             const Tensor& probs, int64_t num_experts, int64_t first_expert,
                             int64_t local_experts);
using Dispatched = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Dispatched dispatch_decomposed(const Tensor& input, const Tensor& expert_ids, const Tensor& probs,
                               int64_t num_experts, int64_t first_expert, int64_t local_experts);

// The order in which copies lie by their group, those of one group as they come: int32 positions
// like `ids`, and the number of copies of each group. An id of -1 is in no group, and those
// outside of `groups` are left out like it.
struct Sorted {
  Tensor positions;
  Tensor splits;  // int64
};
struct GroupRange {
  int64_t first, count;
};
// `known`: the end of all ids that there may be.
void sort_by_group_cpu(const Checks& check, const Tensor& ids, int64_t known, GroupRange groups,
                       const Tensor& splits, const Tensor& positions);
Sorted sort_by_group_decomposed(const Tensor& ids, GroupRange groups);

}  // namespace transformer_ops
