// backward:  g ─► [Bias'] ─► BasicLinear' ─► AllGather' ─► g
//
//   rows of all ranks  gather beside the product that gives grad_input of all ranks' rows,
//   grad_input         scatter of its sums beside the product that gives grad_weight
#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/parallel_linear.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops::fused::gather_linear {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, int64_t group_size, std::string_view, bool with_bias) {
  const TensorSpec whole = gathered(check, "input", input, group_size);
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, whole);
  specs.push_back(with_bias ? bias_gradient(grad_output) : absent(grad_output.scalar_type()));
  return specs;
}

void backward(const Call& call, const Tensor& grad_output, const Tensor& input,
              const Tensor& weight, int64_t group_size, std::string_view group, bool with_bias,
              Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const Ranks ranks{group_size, group};
  auto sizes = input.sizes().vec();
  sizes[0] *= group_size;
  const auto made = [&] { return empty(sizes, input.scalar_type(), input.device()); };
  Tensor whole = made();
  start_gather(call, input, ranks, whole);
  const Tensor grad_whole = made();
  parallel_input_gradient(grad_output, weight, grad_whole);
  finish(call, ranks, whole);
  start_scatter(call, grad_whole, ranks, grad_input);
  parallel_weight_gradient(call, grad_output, whole, grad_weight, with_bias ? grad_bias : Tensor());
  finish(call, ranks, grad_input);
}

std::tuple<Tensor, Tensor, Tensor> backward_unfused(const Checks& check, const Tensor& grad_output,
                                                    const Tensor& input, const Tensor& weight,
                                                    int64_t group_size, std::string_view group,
                                                    bool with_bias) {
  const auto [grad_whole, grad_weight] =
      linear_backward_unfused(grad_output, gather_unfused(check, input, group_size, group), weight);
  return {scatter_unfused(check, grad_whole, group_size, group), grad_weight,
          with_bias ? sum_of_rows(grad_output) : Tensor()};
}

[[maybe_unused]] const bool registered =
    register_fused_op(make_rule({.name = "gather_linear",
                                 .pattern = {{"AllGather"}, {"BasicLinear"}, optional_op({"Bias"})},
                                 .shape = shape,
                                 .bodies = {backward, backward, backward_unfused}}));

}  // namespace
}  // namespace transformer_ops::fused::gather_linear
