// Calls torch's own collectives in a process group, which is identified only by its name. No c10d
// header is needed, so a C++ program can use the groups that it has registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "op/checks.h"

namespace transformer_ops {

struct Ranks {
  int64_t count;
  std::string_view group;
};

// The sizes of the results. They raise if there is no first dimension, or if its size does not fit.
TensorSpec gathered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);
TensorSpec scattered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);
TensorSpec reduced(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);

// Each function starts a collective on contiguous tensors, which finish() waits for. Sums are over
// all ranks.
void start_gather(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output);
void start_scatter(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output);
void start_reduce(const Checks& check, const Ranks& ranks, Tensor& in_place);
// Waits until the result is complete.
void finish(const Checks& check, const Ranks& ranks, const Tensor& result);

// The decompositions: the same in one differentiable call. The derivative of a gather is a scatter
// of sums, and vice versa; that of a sum over ranks is the gradient of each rank.
Tensor gather_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group);
Tensor scatter_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                          std::string_view group);
Tensor reduce_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group);
// Returns the input itself; its gradient is summed.
Tensor reduce_gradient_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                                  std::string_view group);

}  // namespace transformer_ops
