// The heads, masks and seeds that every way to compute attention shares.
#pragma once

#include <algorithm>

#include "wrappers/attention.h"

namespace transformer_ops {

// Each has shape [..., heads, rows, head_dim].
struct Heads {
  Tensor query, key, value;
};

double scale_of(const Attention& attention);

// Heads of rows, without a copy.
Tensor heads_at(const Tensor& rows, int64_t first, int64_t heads, int64_t head_dim);
Heads heads_of(const Tensor& rows, const Attention& attention);
// [..., rows, heads, head_dim] of rows that are by head: 0 for queries, 1 for keys, 2 for values.
Tensor part_by_head(const Tensor& rows, const Attention& attention, int64_t which);

// [batches, rows, width]
Tensor with_one_batch(const Tensor& tensor);

// Copies [batches, heads, rows, head_dim] gradients into an empty tensor like the input, which is
// returned.
Tensor rows_of_heads(const Heads& gradients, const Attention& attention, const Tensor& result);

// Does function(number) hold for any of the numbers, which have a dtype of sums?
template <class F>
bool any_of(const Tensor& numbers, F function) {
  const auto among = [&]<class T>(const T* first) {
    return std::any_of(first, first + numbers.numel(), function);
  };
  return numbers.scalar_type() == at::kDouble ? among(numbers.const_data_ptr<double>())
                                              : among(numbers.const_data_ptr<float>());
}

// The numbers to add to scores, or an undefined tensor if nothing is masked.
Tensor mask_of(const Tensor& input, const Tensor* mask, const Attention& attention,
               at::ScalarType dtype);

// The same for kernels of torch, if a mask is given: [batches or 1, heads or 1, rows or 1,
// columns], or without its first two dimensions.
std::optional<Tensor> added_mask(const Tensor& input, const Tensor* mask,
                                 const Attention& attention, at::ScalarType dtype);

// A number up to kSmall, added to scores, costs no digits. One of kAbsorbing rounds any score away,
// also in float64.
inline constexpr double kSmall = 64, kAbsorbing = 1e18;
// Numbers to add to scores, less the greatest of each row if it is between these limits, which
// changes no probability. Scores would be rounded to its size.
Tensor relative(const Tensor& mask, double limit = kAbsorbing);
// What that subtracts from each row.
Tensor shift_of(const Tensor& mask, double limit = kAbsorbing);

// Adds the score of the sink to the statistics [..., rows, heads], and multiplies the output
// [..., rows, width] in place by the part of the probabilities that is not the sink's. Does nothing
// without sinks.
void add_sinks(const Attention& attention, Tensor& output, Tensor& log_sum_exp);
// Their gradient, from an output and statistics that have them.
Tensor sinks_gradient(const Attention& attention, const Tensor& grad_output, const Tensor& output,
                      const Tensor& log_sum_exp);

Tensor no_seed(const Tensor& input);
Tensor seed_tensor(uint64_t seed, const Tensor& input);

}  // namespace transformer_ops
