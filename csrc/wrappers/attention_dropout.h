// Attention with dropout on CPU, which torch's kernel lacks: scores of a few heads and rows at a
// time, made again in backward.
#pragma once

#include "wrappers/attention.h"

namespace transformer_ops {

// The output and log(sum(exp(scores))), both in the dtype of sums.
std::tuple<Tensor, Tensor> dropped_attention_cpu(const Tensor& input, const Tensor* mask,
                                                 const Attention& attention, uint64_t seed);
// The gradient of the input, in the same dtype.
Tensor dropped_attention_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                      const Tensor* mask, const Attention& attention,
                                      const Tensor& log_sum_exp, uint64_t seed);

// Zero for a number that is dropped, else 1 / (1 - p), like probabilities of all heads.
Tensor drop_factors_cpu(const Tensor& probabilities, const Attention& attention, uint64_t seed);

}  // namespace transformer_ops
