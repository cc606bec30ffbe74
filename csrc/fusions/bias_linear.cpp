// backward:  g ─► Bias' ─► BasicLinear' ─► g      the product that gives grad_weight sums the rows
//                  └─► grad_bias
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

namespace transformer_ops::fused::bias_linear {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;
// The flags of the wanted results among (grad_input, grad_weight, grad_bias).
using Mask = std::array<bool, 3>;

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, Mask wanted) {
  check.has_rows("input", input);
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, like(input));
  specs.push_back(bias_gradient(grad_output));
  for (size_t k = 0; k < specs.size(); ++k) {
    if (!wanted[k]) specs[k] = absent(grad_output.scalar_type());
  }
  return specs;
}

Gradients backward_cpu(const Call& call, const Tensor& grad_output, Tensor input,
                       const Tensor& weight, Mask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  Tensor grad_bias = empty_cpu({wants_bias ? grad_output.size(-1) : 0}, grad_output.scalar_type());
  if (wants_bias) sum_columns_cpu(grad_output, grad_bias);
  if (!wants_weight) input.reset();
  auto [grad_input, grad_weight] = linear_backward_cpu(
      grad_output, std::move(input), factor(wants_input, &weight), {.main_grad = call.main_grad()});
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

Gradients backward_cuda(const Call& call, const Tensor& grad_output, Tensor input,
                        const Tensor& weight, Mask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto made = [&](bool is_wanted, at::IntArrayRef sizes) {
    constexpr std::array<int64_t, 1> none = {0};
    return empty(is_wanted ? sizes : at::IntArrayRef(none), grad_output.scalar_type(),
                 grad_output.device());
  };
  const MainGrad& main_grad = call.main_grad();
  Tensor grad_weight =
      main_grad.buffer.defined() ? main_grad.buffer : made(wants_weight, weight.sizes());
  Tensor grad_bias = made(wants_bias, weight.size(0));
  if (wants_weight) {
    linear_weight_gradient_cuda(
        grad_output, input, grad_weight,
        {.adds = main_grad.adds, .grad_bias = wants_bias ? grad_bias : Tensor()});
  } else if (wants_bias) {
    sum_columns_cuda(grad_output, grad_bias);
  }
  input.reset();
  Tensor grad_input =
      wants_input ? linear_input_gradient_cuda(grad_output, weight) : made(false, {});
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

Gradients backward_decomposed(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                              Mask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto [grad_input, grad_weight] = linear_backward_decomposed(
      grad_output, factor(wants_weight, &input), factor(wants_input, &weight));
  return {grad_input, grad_weight, wants_bias ? sum_of_rows(grad_output) : Tensor()};
}

std::optional<std::string> why_not(const Match& match) {
  if (!match.parameter_requires_grad(1, 0)) return "the bias needs no gradient";
  if (!match.parameter_requires_grad(0, 0)) return "the weight needs no gradient";
  if (!match.input_requires_grad()) return "the input needs no gradient";
  return different_linear_dtypes(match);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "bias_linear",
             .pass = Pass::Backward,
             // runs after the rules that save a pass over the gradient
             .benefit = 5,
             .pattern = {{"BasicLinear"}, {"Bias"}},
             .why_not = why_not,
             .under_recipe = UnderRecipe::EachCall},
    .backward =
        {.schema =
             "bias_linear_backward(Tensor grad_output, Tensor input, Tensor weight, "
             "bool[3] output_mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
         .shape = shape,
         .any_strides = {"input", "weight"},
         .products = {.list = {{"weight"}}},
         .bodies = {backward_cpu, backward_cuda, backward_decomposed},
         .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::fused::bias_linear
