// BasicLinear: y = x W^T. The product itself is PyTorch's (MKL or oneDNN), or cuBLASLt's.
#include <ATen/ops/linear.h>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

namespace transformer_ops::ops::basic_linear {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& weight) {
  return {linear_output(check, input, weight)};
}

Tensor forward_cpu(const Call& call, const Tensor& input, const Tensor& weight) {
  const auto [x, factor] = scaled_operand(input, call.scales());
  return linear_cpu(x, weight, /*bias=*/{}, factor);
}

Tensor forward_cuda(const Call& call, const Tensor& input, const Tensor& weight) {
  return linear_cuda(input, weight, /*bias=*/{}, /*scale=*/1.0, call.scales());
}

Tensor forward_decomposed(const Tensor& input, const Tensor& weight) {
  return at::linear(input, weight);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor* weight, LinearMask wanted) {
  return linear_backward_outputs(check, grad_output, input, weight, wanted);
}

LinearBackward backward_cpu(const Call& call, const Tensor& grad_output,
                            std::optional<Tensor> input, const Tensor* weight, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  const auto [grad, scale] = scaled_operand(grad_output, call.scales());
  return linear_backward_cpu(grad, factor(wants_weight, std::move(input)),
                             factor(wants_input, weight),
                             {.scale = scale, .main_grad = call.main_grad()});
}

LinearBackward backward_cuda(const Call& call, const Tensor& grad_output,
                             std::optional<Tensor> input, const Tensor* weight, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  return linear_backward_cuda(grad_output, factor(wants_weight, std::move(input)),
                              factor(wants_input, weight),
                              {.main_grad = call.main_grad(), .scales = call.scales()});
}

LinearBackward backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                   const Tensor* weight, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  return linear_backward_decomposed(grad_output, factor(wants_weight, input),
                                    factor(wants_input, weight));
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "BasicLinear",
                    .summary = "x W^T over the last dimension",
                    .parameters = {"weight"},
                    .attributes = {"in_features", "out_features", "accumulate_into_main_grad"},
                    .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
                    .states = {{"main_grad", "weight", "accumulate_into_main_grad"}},
                    .dtype = DTypeRule::Parameter,
                    .operands = {"input", "weight"},
                    .width =
                        [](const Attributes& attributes, int64_t) {
                          return std::get<int64_t>(attributes.at("out_features"));
                        }},
    .forward = {.schema = "linear(Tensor input, Tensor weight) -> Tensor output",
                .shape = forward_shape,
                .any_strides = {"input", "weight"},
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .scalable = true},
    .backward = {.schema = "linear_backward(Tensor grad_output, Tensor? input, Tensor? weight, "
                           "bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .any_strides = {"grad_output", "input", "weight"},
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true,
                 .scalable = true},
    .recompute = recompute_by({.schema = "linear(Tensor input, Tensor weight) -> Tensor output",
                               .shape = forward_shape,
                               .any_strides = {"input", "weight"},
                               .products = {.list = {{"weight"}}},
                               .bodies = {forward_cpu, forward_cuda, forward_decomposed}}),
});

}  // namespace
}  // namespace transformer_ops::ops::basic_linear
