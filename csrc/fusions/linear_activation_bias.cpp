// backward:  g ─► BasicLinear' ─► activation' ─► Bias' ─► g      grad_bias: sums over its rows
//             └─► grad_weight ◄─ y, computed again in the same pass
#include "ops/bias.h"
#include "ops/linear_activation.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  TensorSpecs specs = linear_activation_outputs(args);
  specs.push_back(bias_gradient(args.tensor(1)));
  return specs;
}

Tensors unfused(const Args& args) {
  Tensors grads = linear_activation_unfused(args);
  grads.push_back(grads[0].sum_to_size_symint({grads[0].sym_size(-1)}));
  return grads;
}

std::optional<std::string> why_not(const Match& match) {
  if (auto reason = no_bias_gradient(match)) return reason;
  return why_not_recomputed(match, 1);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_activation_bias",
             .pass = Pass::Backward,
             .benefit = 40,
             .pattern = {{"Bias"}, activations_that_keep_input(), {"BasicLinear"}},
             .why_not = why_not,
             .bind = [](const Match& match) { return bind_linear_activation(match, 1); }},
    .backward = {.schema = std::string("linear_activation_bias_backward(") +
                           kLinearActivationArguments +
                           ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {1},
                 .cpu = linear_activation_cpu,
                 .cuda = linear_activation_cuda,
                 .unfused = unfused,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
