// backward:  g ─► [Bias'] ─► BasicLinear' ─► AllGather' ─► g
//
//   rows of all ranks  are gathered while the product for their grad_input runs
//   grad_input         its sums are scattered while the product for grad_weight runs
//
//   Alone, grad_input needs only the scatter, grad_weight only the gather, and grad_bias neither.
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/parallel_linear.h"

namespace transformer_ops::fused::gather_linear {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, int64_t group_size, std::string_view, ParallelMask wanted) {
  const TensorSpec whole = gathered(check, "input", input, group_size);
  return parallel_outputs(linear_backward_outputs(check, grad_output, input, weight, whole),
                          grad_output, wanted);
}

void backward(const Call& call, const Tensor& grad_output, const Tensor& input,
              const Tensor& weight, int64_t group_size, std::string_view group, ParallelMask wanted,
              Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Ranks ranks{group_size, group};
  auto sizes = input.sizes().vec();
  sizes[0] *= group_size;
  const auto made = [&] { return empty(sizes, input.scalar_type(), input.device()); };
  Tensor whole, grad_whole;
  if (wants_weight) {
    whole = made();
    start_gather(call, input, ranks, whole);
  }
  if (wants_input) {
    grad_whole = made();
    parallel_input_gradient(grad_output, weight, grad_whole);
  }
  if (wants_weight) finish(call, ranks, whole);
  if (wants_input) start_scatter(call, grad_whole, ranks, grad_input);
  parallel_weight_gradient(call, grad_output, whole, wants_weight ? grad_weight : Tensor(),
                           wants_bias ? grad_bias : Tensor());
  if (wants_input) finish(call, ranks, grad_input);
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Checks& check,
                                                       const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& weight,
                                                       int64_t group_size, std::string_view group,
                                                       ParallelMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor whole = wants_weight ? gather_decomposed(check, input, group_size, group) : Tensor();
  const auto [grad_whole, grad_weight] =
      linear_backward_decomposed(grad_output, whole, factor(wants_input, &weight));
  return {wants_input ? scatter_decomposed(check, grad_whole, group_size, group) : Tensor(),
          grad_weight, wants_bias ? sum_of_rows(grad_output) : Tensor()};
}

[[maybe_unused]] const bool registered =
    register_fused_op(make_rule({.name = "gather_linear",
                                 .pattern = {{"AllGather"}, {"BasicLinear"}, optional_op({"Bias"})},
                                 .rows = "grad_output",
                                 .shape = shape,
                                 .bodies = {backward, backward, backward_decomposed}}));

}  // namespace
}  // namespace transformer_ops::fused::gather_linear
