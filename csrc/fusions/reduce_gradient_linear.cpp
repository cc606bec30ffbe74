// backward:  g ─► [Bias'] ─► BasicLinear' ─► ReduceGradient' ─► g
//
//   grad_input  is summed over the ranks beside the product that gives grad_weight
#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/parallel_linear.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops::fused::reduce_gradient_linear {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, int64_t group_size, std::string_view, bool with_bias) {
  const TensorSpec whole = reduced(check, "input", input, group_size);
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, whole);
  specs.push_back(with_bias ? bias_gradient(grad_output) : absent(grad_output.scalar_type()));
  return specs;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Call& call, const Tensor& grad_output,
                                            const Tensor& input, const Tensor& weight,
                                            int64_t group_size, std::string_view group,
                                            bool with_bias) {
  const Ranks ranks{group_size, group};
  const auto made = [&](at::IntArrayRef sizes) {
    return empty(sizes, grad_output.scalar_type(), grad_output.device());
  };
  Tensor grad_input = made(input.sizes());
  parallel_input_gradient(grad_output, weight, grad_input);
  start_reduce(call, ranks, grad_input);
  const Tensor& main_grad = call.main_grad().buffer;
  Tensor grad_weight = main_grad.defined() ? main_grad : made(weight.sizes());
  Tensor grad_bias = made(with_bias ? weight.size(0) : 0);
  parallel_weight_gradient(call, grad_output, input, grad_weight, with_bias ? grad_bias : Tensor());
  finish(call, ranks, grad_input);
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor, Tensor> backward_unfused(const Checks& check, const Tensor& grad_output,
                                                    const Tensor& input, const Tensor& weight,
                                                    int64_t group_size, std::string_view group,
                                                    bool with_bias) {
  const auto [grad_input, grad_weight] = linear_backward_unfused(grad_output, input, weight);
  return {reduce_unfused(check, grad_input, group_size, group), grad_weight,
          with_bias ? sum_of_rows(grad_output) : Tensor()};
}

[[maybe_unused]] const bool registered = register_fused_op(
    make_rule({.name = "reduce_gradient_linear",
               .pattern = {{"ReduceGradient"}, {"BasicLinear"}, optional_op({"Bias"})},
               .shape = shape,
               .bodies = {backward, backward, backward_unfused}}));

}  // namespace
}  // namespace transformer_ops::fused::reduce_gradient_linear
