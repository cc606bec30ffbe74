// backward:  g ─► [ConstantScale'] ─► BasicLinear' ─► [(+)] ─► g
//                    g of the extra output ─────────────┘
//
// The products apply the scale, so there is no pass over g. The product for the input's gradient
// starts from the residual's gradient.
#include <ATen/ops/add.h>

#include <cmath>

#include "op/op.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"
#include "wrappers/make_extra_output.h"

namespace transformer_ops::fused::linear_residual_scale {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor* grad_extra_output,
                  const Tensor* input, const Tensor* weight, double, LinearMask wanted) {
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, wanted);
  if (grad_extra_output != nullptr && wanted[0]) {
    specs[0] = with_extra_gradient(check, specs[0], *grad_extra_output);
  }
  return specs;
}

using Product = LinearBackward (*)(const Tensor&, Tensor, const Tensor&, const LinearGradients&);

// `adds`: may the product start from the residual?
LinearBackward backward(Product product, bool adds, const Call& call, const Tensor& grad_output,
                        const Tensor& residual, std::optional<Tensor> input, const Tensor* weight,
                        double scale, LinearMask wanted, const OperandScales& scales = {}) {
  scale = factor_of(product_dtype(grad_output), scale);
  const auto [wants_input, wants_weight] = wanted;
  // A product with factor zero is not computed, so NaN would not pass.
  const Tensor grad = scale == 0 ? grad_output * scale : grad_output;
  LinearBackward grads =
      product(grad, factor(wants_weight, std::move(input)), factor(wants_input, weight),
              {.scale = scale == 0 ? 1.0 : scale,
               .residual = adds ? residual : Tensor(),
               .main_grad = call.main_grad(),
               .scales = scales});
  if (!residual.defined() || adds) return grads;
  auto& [grad_input, grad_weight] = grads;
  grad_input = at::add(grad_input, residual);
  return grads;
}

LinearBackward backward_cpu(const Call& call, const Tensor& grad_output,
                            const Tensor* grad_extra_output, std::optional<Tensor> input,
                            const Tensor* weight, double scale, LinearMask wanted) {
  const Tensor residual = factor(wanted[0] && grad_extra_output != nullptr, grad_extra_output);
  const bool adds = residual.defined() && residual.scalar_type() == grad_output.scalar_type();
  if (!call.scales().defined()) {
    return backward(linear_backward_cpu, adds, call, grad_output, residual, std::move(input),
                    weight, scale, wanted);
  }
  const auto [grad, factor] = scaled_operand(grad_output, call.scales(), scale);
  return backward(linear_backward_cpu, adds, call, grad, residual, std::move(input), weight, factor,
                  wanted);
}

LinearBackward backward_cuda(const Call& call, const Tensor& grad_output,
                             const Tensor* grad_extra_output, std::optional<Tensor> input,
                             const Tensor* weight, double scale, LinearMask wanted) {
  const Tensor residual = factor(wanted[0] && grad_extra_output != nullptr, grad_extra_output);
  const auto dtype = product_dtype(grad_output);
  const bool adds = residual.defined() &&
                    (residual.scalar_type() == dtype ||
                     (residual.scalar_type() == at::kFloat && c10::elementSize(dtype) == 2));
  return backward(linear_backward_cuda, adds, call, grad_output, residual, std::move(input), weight,
                  scale, wanted, call.scales());
}

LinearBackward backward_decomposed(const Tensor& grad_output, const Tensor* grad_extra_output,
                                   const Tensor* input, const Tensor* weight, double scale,
                                   LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  auto [grad_input, grad_weight] =
      linear_backward_decomposed(scale == 1 ? grad_output : grad_output * scale,
                                 factor(wants_weight, input), factor(wants_input, weight));
  if (grad_extra_output != nullptr && wants_input) grad_input = grad_input + *grad_extra_output;
  return {grad_input, grad_weight};
}

// Does rounding before scaling give the same gradient as rounding after it? It does if the scale is
// a power of two, and neither overflows nor loses digits.
bool commutes_with_rounding(double scale) {
  int exponent;
  return std::abs(std::frexp(scale, &exponent)) == 0.5 && std::abs(exponent) <= 16;
}

std::optional<std::string> why_not(const Match& match) {
  if (match.has(2) && std::get<double>(match.op(2).attributes.at("scale")) == 0) {
    return "the scale is 0, and a product with 0 in the weight may hide NaN and infinity";
  }
  if (match.has(2) && match.analysis.is_quantized(match.places[1]) &&
      !commutes_with_rounding(std::get<double>(match.op(2).attributes.at("scale")))) {
    return "the scale is not a power of two from 2^-17 to 2^15, so a scaled gradient would be "
           "rounded";
  }
  return match.has(0) ? no_extra_gradient(match) : std::nullopt;
}

Bindings bind(const Match& match) {
  if (match.has(2)) return {};
  return {{"scale", Attribute(1.0)}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_residual_scale",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {optional_op({"MakeExtraOutput"}),
                         {"BasicLinear"},
                         optional_op({"ConstantScale"})},
             .why_not = why_not,
             .bind = bind,
             .under_recipe = UnderRecipe::OneCall},
    .backward = {.schema = "linear_residual_scale_backward(Tensor grad_output, "
                           "Tensor? grad_extra_output, Tensor? input, Tensor? weight, "
                           "float scale, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = shape,
                 .any_strides = {"grad_output", "input", "weight"},
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true,
                 .scalable = true},
});

}  // namespace
}  // namespace transformer_ops::fused::linear_residual_scale
