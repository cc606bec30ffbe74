// joint:  x ─► ReLU or SReLU ─► y ─► BasicLinear ─► z      saves only y, which the Linear saves
//         anyway: the activation's gradient follows from its output.
#include "kernels/activation.h"
#include "op/op.h"
#include "wrappers/activation.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/sqrt.h>

namespace transformer_ops::fused::activation_linear {
namespace {

// Raises if the activation's gradient does not follow from its output.
const ActivationRow& row_of(const Checks& check, std::string_view name) {
  const ActivationRow& row = activation_of(check, name);
  TORCH_CHECK(row.activation == cpu::Activation::ReLU || row.activation == cpu::Activation::SReLU,
              "[", check.op(), "] activation must be relu or srelu, got '", row.name, "'");
  return row;
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                          std::string_view activation) {
  row_of(check, activation);
  return {linear_output(check, input, weight), like(input)};
}

std::tuple<Tensor, Tensor> forward_cpu(const Checks& check, const Tensor& input,
                                       const Tensor& weight, std::string_view activation) {
  const Tensor activated = empty_cpu(input.sizes(), input.scalar_type());
  activation_forward_cpu(row_of(check, activation), input, activated, {});
  return {linear_cpu(activated, weight), activated};
}

std::tuple<Tensor, Tensor> forward_cuda(const Checks& check, const Tensor& input,
                                        const Tensor& weight, std::string_view activation) {
  const Tensor activated = empty(input.sizes(), input.scalar_type(), input.device());
  activation_forward_cuda(row_of(check, activation), input, activated, {});
  return {linear_cuda(activated, weight), activated};
}

std::tuple<Tensor, Tensor> forward_decomposed(const Checks& check, const Tensor& input,
                                              const Tensor& weight, std::string_view activation) {
  const Tensor activated = row_of(check, activation).decomposition(input);
  return {at::linear(activated, weight), activated};
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& activated,
                           const Tensor* weight, std::string_view activation, LinearMask wanted) {
  row_of(check, activation);
  TensorSpecs specs =
      linear_backward_outputs(check, grad_output, &activated, weight, wanted, "activated");
  const auto [wants_input, wants_weight] = wanted;
  if (wants_input) check.spec("activated", activated, specs[0]);
  return specs;
}

LinearBackward backward_cpu(const Call& call, const Tensor& grad_output, const Tensor& activated,
                            const Tensor* weight, std::string_view activation, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  LinearBackward grads =
      linear_backward_cpu(grad_output, factor(wants_weight, &activated),
                          factor(wants_input, weight), {.main_grad = call.main_grad()});
  if (!wants_input) return grads;
  const ActivationRow& row = row_of(call, activation);
  const cpu::Rows grad{std::get<0>(grads), 1}, y{activated, 1};
  cpu::parallel(grad.count(), 1, 1, [&](int64_t begin, int64_t end) {
    cpu::activation_backward_from_output(row.activation, cpu::kernel_dtype(activated),
                                         grad.read(begin), y.read(begin), grad.write(begin),
                                         end - begin);
  });
  return grads;
}

LinearBackward backward_cuda(const Call& call, const Tensor& grad_output, const Tensor& activated,
                             const Tensor* weight, std::string_view activation, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  LinearBackward grads =
      linear_backward_cuda(grad_output, factor(wants_weight, &activated),
                           factor(wants_input, weight), {.main_grad = call.main_grad()});
  if (!wants_input) return grads;
  const Tensor& grad = std::get<0>(grads);
  cuda::activation_backward_from_output(
      cuda::stream_of(activated), row_of(call, activation).activation, kernel_dtype(activated),
      cuda::read(grad), cuda::read(activated), cuda::write(grad), activated.numel());
  return grads;
}

LinearBackward backward_decomposed(const Checks& check, const Tensor& grad_output,
                                   const Tensor& activated, const Tensor* weight,
                                   std::string_view activation, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  auto [grad_input, grad_weight] = linear_backward_decomposed(
      grad_output, factor(wants_weight, &activated), factor(wants_input, weight));
  if (!wants_input) return {grad_input, grad_weight};
  const bool squared = row_of(check, activation).activation == cpu::Activation::SReLU;
  const Tensor slope =
      squared ? 2 * at::sqrt(activated) : (activated > 0).to(activated.scalar_type());
  return {grad_input * slope, grad_weight};
}

std::optional<std::string> why_not(const Match& match) {
  if (!match.key().grad_enabled) return "no gradient is wanted";
  if (match.parameter_requires_grad(1, 0)) return std::nullopt;
  return "the weight needs no gradient, so the Linear saves no input";
}

Bindings bind(const Match& match) {
  return {{"activation", Attribute(activation_of_kind(match.kind(0)).name)},
          {"activated", Field{1, "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "activation_linear",
             .pass = Pass::Joint,
             .benefit = 10,
             .pattern = {{"ReLU", "SReLU"}, {"BasicLinear"}},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema = "activation_linear(Tensor input, Tensor weight, str activation) -> "
                          "(Tensor output, Tensor activated)",
                .shape = forward_shape,
                .any_strides = {"weight"},
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed}},
    .backward = {.schema = "activation_linear_backward(Tensor grad_output, Tensor activated, "
                           "Tensor? weight, str activation, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .any_strides = {"grad_output", "weight"},
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::fused::activation_linear
