// backward:  g ─► [Bias'] ─► BasicLinear' ─► ReduceGradient' ─► g
//
//   grad_input is summed over the ranks while the product for grad_weight runs.
//
//   Without grad_input there is no sum over the ranks.
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/parallel_linear.h"

namespace transformer_ops::fused::reduce_gradient_linear {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, int64_t group_size, std::string_view, ParallelMask wanted) {
  const TensorSpec whole = reduced(check, "input", input, group_size);
  return parallel_outputs(linear_backward_outputs(check, grad_output, input, weight, whole),
                          grad_output, wanted);
}

std::tuple<Tensor, Tensor, Tensor> backward(const Call& call, const Tensor& grad_output,
                                            const Tensor& input, const Tensor& weight,
                                            int64_t group_size, std::string_view group,
                                            ParallelMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Ranks ranks{group_size, group};
  const auto made = [&](bool is_wanted, at::IntArrayRef sizes) {
    constexpr std::array<int64_t, 1> none = {0};
    return empty(is_wanted ? sizes : at::IntArrayRef(none), grad_output.scalar_type(),
                 grad_output.device());
  };
  Tensor grad_input = made(wants_input, input.sizes());
  if (wants_input) {
    parallel_input_gradient(grad_output, weight, grad_input);
    start_reduce(call, ranks, grad_input);
  }
  const Tensor& main_grad = call.main_grad().buffer;
  Tensor grad_weight = main_grad.defined() ? main_grad : made(wants_weight, weight.sizes());
  Tensor grad_bias = made(wants_bias, weight.size(0));
  parallel_weight_gradient(call, grad_output, input, wants_weight ? grad_weight : Tensor(),
                           wants_bias ? grad_bias : Tensor());
  if (wants_input) finish(call, ranks, grad_input);
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Checks& check,
                                                       const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& weight,
                                                       int64_t group_size, std::string_view group,
                                                       ParallelMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto [grad_input, grad_weight] = linear_backward_decomposed(
      grad_output, factor(wants_weight, &input), factor(wants_input, &weight));
  return {wants_input ? reduce_decomposed(check, grad_input, group_size, group) : Tensor(),
          grad_weight, wants_bias ? sum_of_rows(grad_output) : Tensor()};
}

[[maybe_unused]] const bool registered = register_fused_op(
    make_rule({.name = "reduce_gradient_linear",
               .pattern = {{"ReduceGradient"}, {"BasicLinear"}, optional_op({"Bias"})},
               .rows = "grad_output",
               .shape = shape,
               .bodies = {backward, backward, backward_decomposed}}));

}  // namespace
}  // namespace transformer_ops::fused::reduce_gradient_linear
