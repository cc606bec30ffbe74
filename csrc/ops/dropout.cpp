// Dropout: zeroes elements with probability p and scales the rest by 1 / (1 - p). It saves one bit
// for each element. The bits come from Philox counters; their key is one number of torch's
// generator.
#include <ATen/ops/dropout.h>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/dropout.h"

namespace transformer_ops::ops::dropout {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, double p, bool save_mask) {
  check.compute_dtype("input", input);
  check_probability(check, p);
  return {like(input), save_mask ? bit_mask(input) : absent(at::kByte)};
}

void forward_cpu(const Tensor& input, double p, bool save_mask, Tensor& output, Tensor& mask) {
  drop_cpu(input, p, output, save_mask ? &mask : nullptr);
}

void forward_cuda(const Tensor& input, double p, bool save_mask, Tensor& output, Tensor& mask) {
  drop_cuda(input, p, output, save_mask ? &mask : nullptr);
}

Tensor forward_decomposed(const Tensor& input, double p, bool) {
  return at::dropout(input, p, /*train=*/true);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& mask,
                           double p) {
  check.compute_dtype("grad_output", grad_output);
  check.spec("mask", mask, bit_mask(grad_output));
  check_probability(check, p);
  return {like(grad_output)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& mask, double p, Tensor& grad_input) {
  apply_mask_cpu(grad_output, mask, p, grad_input);
}

void backward_cuda(const Tensor& grad_output, const Tensor& mask, double p, Tensor& grad_input) {
  apply_mask_cuda(grad_output, mask, p, grad_input);
}

// Recomputing applies the same mask as backward.
TypedOp make_recompute() {
  return recompute_by({.schema = "dropout(Tensor input, Tensor mask, float p) -> Tensor output",
                       .shape = backward_shape,
                       .overwrites = {"input"},
                       .bodies = {backward_cpu, backward_cuda, dropout_decomposed}});
}

// If there is no mask, dropout was inactive, or no gradient passes.
Tensor replay(const ReplayCall& call) {
  const Tensor mask = call.slot("mask");
  if (!mask.defined()) return call.input;
  return dropout_decomposed(call.input, mask, std::get<double>(call.attributes.at("p")));
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Dropout",
                    .summary = "x / (1 - p) where an element is not dropped, else 0",
                    .attributes = {"p"},
                    .slots = {{"mask"}},
                    .inactive =
                        [](const Attributes& attributes, bool training) {
                          return !training || std::get<double>(attributes.at("p")) == 0;
                        }},
    .forward = {.schema = "dropout(Tensor input, float p, bool save_mask) -> "
                          "(Tensor output, Tensor mask)",
                .shape = forward_shape,
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .random = true},
    .backward = {.schema = "dropout_backward(Tensor grad_output, Tensor mask, float p) -> "
                           "Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {"grad_output"},
                 .bodies = {backward_cpu, backward_cuda, dropout_decomposed}},
    .recompute = make_recompute(),
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::dropout
