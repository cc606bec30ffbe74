// Attention on CPU in parts: scores of a few heads and rows at a time, made again in backward. It
// drops numbers, which torch's kernel does not, and is exact where that kernel is not.
#pragma once

#include "wrappers/attention.h"

namespace transformer_ops {

// Does float32 lack the scale, or perhaps numbers of the mask?
bool needs_float64(const Tensor& input, const Tensor* mask, const Attention& attention);

// Are these statistics small enough for backward to compute probabilities from them?
bool are_ordinary(const Tensor& log_sum_exp);

// The output and log(sum(exp(scores))), both in a dtype of sums.
std::tuple<Tensor, Tensor> attention_in_parts_cpu(const Tensor& input, const Tensor* mask,
                                                  const Attention& attention, uint64_t seed);
// The gradient of the input, in such a dtype, and the statistics that it was computed with, which
// are computed again if they are not given.
std::tuple<Tensor, Tensor> attention_in_parts_backward_cpu(const Tensor& grad_output,
                                                           const Tensor& input, const Tensor* mask,
                                                           const Attention& attention,
                                                           const Tensor* log_sum_exp,
                                                           uint64_t seed);

// Zero for a number that is dropped, else 1 / (1 - p), like probabilities of all heads.
Tensor drop_factors_cpu(const Tensor& probabilities, const Attention& attention, uint64_t seed);

}  // namespace transformer_ops
