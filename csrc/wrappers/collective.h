// Collectives of torch's own among the ranks of a process group, which is known by its name alone:
// no header of c10d, so a C++ program uses the groups that it has registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "op/checks.h"

namespace transformer_ops {

struct Ranks {
  int64_t count;
  std::string_view group;
};

// Sizes along the first dimension; they raise where there is none, and where it does not fit.
TensorSpec gathered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);
TensorSpec scattered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);
TensorSpec reduced(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks);

// Each starts what finish() ends, on contiguous tensors; sums are those of all ranks.
void start_gather(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output);
void start_scatter(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output);
void start_reduce(const Checks& check, const Ranks& ranks, Tensor& in_place);
// The results of what was started are there.
void finish(const Checks& check, const Ranks& ranks, const Tensor& result);

// The same in one, differentiable: the decompositions. The derivative of a gather is a scatter of
// sums and the other way round; that of a sum over ranks is what each rank gives for it.
Tensor gather_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group);
Tensor scatter_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                          std::string_view group);
Tensor reduce_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group);
// The input itself, whose gradient is summed.
Tensor reduce_gradient_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                                  std::string_view group);

}  // namespace transformer_ops
