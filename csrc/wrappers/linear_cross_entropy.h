// The cross entropy of a product's rows, by chunks of rows: the logits of all rows never exist at
// the same time.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "op/typed_op.h"

namespace transformer_ops {

// What the op computes besides the product (kernels/cross_entropy.h has the formula).
struct CrossEntropyOptions {
  int64_t ignore_index;
  double label_smoothing;
  std::optional<double> softcap;
  double z_loss;
  std::string_view reduction;  // "mean", "sum" or "none"

  bool has_rows() const { return reduction == "none"; }
};

// The operands of the product, and the class of each row.
struct CrossEntropyOperands {
  const Tensor& input;
  const Tensor& weight;
  const Tensor* bias;
  const Tensor& target;
};

// Raises if the operands or the options do not fit.
void check_cross_entropy(const Checks& check, const CrossEntropyOperands& operands,
                         const CrossEntropyOptions& options, std::optional<int64_t> chunk);
// The spec of the loss: one number, or one for each row.
TensorSpec cross_entropy_output(const CrossEntropyOperands& operands,
                                const CrossEntropyOptions& options);

// Which of the gradients of (input, weight, bias) are wanted.
using CrossEntropyMask = std::array<bool, 3>;
// The gradients of (input, weight, bias); undefined if they are not wanted.
using CrossEntropyGradients = std::array<Tensor, 3>;

// The results of forward. All but the gradients are in the accumulate dtype.
struct CrossEntropyResults {
  Tensor output;
  Tensor log_probs;  // the log-probability of each target; 0 for ignored rows
  Tensor accuracy;   // the share of the rows that count whose target has the largest logit
  Tensor lse;        // log(sum(exp(logits))) of each row
  CrossEntropyGradients gradients;
  // [1]: the gradients are to be multiplied by this. It is 0 if no row counts, and else 1 unless
  // the dtype has a small range.
  Tensor factor;
};

// The loss, and its gradients. Raises IndexError before anything is computed if a target is neither
// a class nor ignore_index.
CrossEntropyResults cross_entropy_cpu(const Checks& check, const CrossEntropyOperands& operands,
                                      const CrossEntropyOptions& options,
                                      std::optional<int64_t> chunk, CrossEntropyMask wanted);
CrossEntropyResults cross_entropy_cuda(const Checks& check, const CrossEntropyOperands& operands,
                                       const CrossEntropyOptions& options,
                                       std::optional<int64_t> chunk, CrossEntropyMask wanted);

// The gradients, from logits that are computed again.
CrossEntropyGradients cross_entropy_backward_cpu(
    const Tensor& grad_output, const CrossEntropyOperands& operands, const Tensor& lse,
    const CrossEntropyOptions& options, std::optional<int64_t> chunk, CrossEntropyMask wanted);
CrossEntropyGradients cross_entropy_backward_cuda(
    const Tensor& grad_output, const CrossEntropyOperands& operands, const Tensor& lse,
    const CrossEntropyOptions& options, std::optional<int64_t> chunk, CrossEntropyMask wanted);

// (output, log_probs, accuracy) from the whole logits, in plain differentiable ATen calls.
std::tuple<Tensor, Tensor, Tensor> cross_entropy_decomposed(const CrossEntropyOperands& operands,
                                                            const CrossEntropyOptions& options);

// What multiplies gradients that forward has made. If no row counts it is 0 even for an infinite
// gradient of the loss: some divide a sum over no item by 0.
Tensor gradient_factor(const Tensor& grad_output, const Tensor& factor);
// A gradient that forward has made, times a number. It reuses the memory if nothing else refers to
// it.
Tensor scaled_gradient(Tensor gradient, const Tensor& factor);

}  // namespace transformer_ops
