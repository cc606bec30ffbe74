// Bias: y = x + b over the last dimension.
#include <ATen/ops/add.h>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/bias.h"

namespace transformer_ops::ops::bias {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& bias) {
  check.compute_dtype("input", input);
  check_bias(check, input, bias);
  return {like(input)};
}

void forward_cpu(const Tensor& input, const Tensor& bias, Tensor& output) {
  add_bias_cpu(input, bias, output);
}

void forward_cuda(const Tensor& input, const Tensor& bias, Tensor& output) {
  add_bias_cuda(input, bias, output);
}

Tensor forward_decomposed(const Tensor& input, const Tensor& bias) {
  const Tensor x = to_accumulate(input);
  return (x + bias.to(x.scalar_type())).to(input.scalar_type());
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  return {bias_gradient(grad_output)};
}

void backward_cpu(const Tensor& grad_output, Tensor& grad_bias) {
  sum_columns_cpu(grad_output, grad_bias);
}

void backward_cuda(const Tensor& grad_output, Tensor& grad_bias) {
  sum_columns_cuda(grad_output, grad_bias);
}

const TypedOp kForward = {.schema = "bias(Tensor input, Tensor bias) -> Tensor output",
                          .shape = forward_shape,
                          .overwrites = {"input"},
                          .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                          .by_rows = {"input"}};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Bias",
                    .summary = "x + b over the last dimension",
                    .parameters = {"bias"},
                    .attributes = {"size"}},
    .forward = kForward,
    .backward = {.schema = "bias_backward(Tensor grad_output) -> Tensor grad_bias",
                 .shape = backward_shape,
                 .bodies = {backward_cpu, backward_cuda, sum_of_rows}},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::bias
