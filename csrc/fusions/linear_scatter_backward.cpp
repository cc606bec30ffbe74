// backward:  g ─► ReduceScatter' ─► [Bias'] ─► BasicLinear' ─► g
//
//   Rows of g are gathered in chunks, each while the product for grad_input of the chunk before
//   runs. Then grad_weight sums over all of them. Each gradient alone needs the gather.
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/parallel_linear.h"

namespace transformer_ops::fused::linear_scatter_backward {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, int64_t group_size, std::string_view, ParallelMask wanted) {
  TensorSpec output = linear_output(check, input, weight);
  output.sizes[0] = scattered_rows(check, input, group_size);
  check.spec("grad_output", grad_output, output);
  return parallel_outputs({like(input), like(weight)}, grad_output, wanted);
}

void backward(const Call& call, const Tensor& grad_output, const Tensor& input,
              const Tensor& weight, int64_t group_size, std::string_view group, ParallelMask wanted,
              Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  auto sizes = grad_output.sizes().vec();
  sizes[0] = input.size(0);
  Tensor whole;
  if (wants_weight || wants_bias) {
    whole = empty(sizes, grad_output.scalar_type(), grad_output.device());
  }
  gather_beside(call, grad_output, {group_size, group}, kLeastRowsOfGradient, whole,
                wants_input ? grad_input : Tensor(), [&](const Tensor& rows, const Tensor& into) {
                  parallel_input_gradient(rows, weight, into);
                });
  if (!whole.defined()) return;
  parallel_weight_gradient(call, whole, input, wants_weight ? grad_weight : Tensor(),
                           wants_bias ? grad_bias : Tensor());
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Checks& check,
                                                       const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& weight,
                                                       int64_t group_size, std::string_view group,
                                                       ParallelMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor whole = gather_decomposed(check, grad_output, group_size, group);
  const auto [grad_input, grad_weight] =
      linear_backward_decomposed(whole, factor(wants_weight, &input), factor(wants_input, &weight));
  return {grad_input, grad_weight, wants_bias ? sum_of_rows(whole) : Tensor()};
}

[[maybe_unused]] const bool registered = register_fused_op(
    make_rule({.name = "linear_scatter",
               .pattern = {{"BasicLinear"}, optional_op({"Bias"}), {"ReduceScatter"}},
               .rows = "input",
               .shape = shape,
               .bodies = {backward, backward, backward_decomposed}}));

}  // namespace
}  // namespace transformer_ops::fused::linear_scatter_backward
