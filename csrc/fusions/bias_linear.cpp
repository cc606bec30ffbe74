// backward:  g ─► Bias' ─► BasicLinear' ─► g      the product that gives grad_weight sums the rows
//                  └─► grad_bias
#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  check_has_rows(args, "input", args.tensor(1));
  TensorSpecs specs = linear_backward_outputs(args, like(args.tensor(1)));
  specs.push_back(bias_gradient(args.tensor(0)));
  return specs;
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  Tensor grad_bias = empty_cpu({grad.size(-1)}, grad.scalar_type());
  sum_columns_cpu(grad, grad_bias);
  results =
      linear_backward_cpu(grad, args.take(1), args.tensor(2), {.main_grad = args.main_grad()});
  results.push_back(grad_bias);
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &grad = args.tensor(0), &weight = args.tensor(2);
  const auto made = [&](at::IntArrayRef sizes) {
    return empty(sizes, grad.scalar_type(), grad.device());
  };
  const MainGrad& main_grad = args.main_grad();
  results = {Tensor(), main_grad.buffer.defined() ? main_grad.buffer : made(weight.sizes()),
             made(weight.size(0))};
  linear_weight_gradient_cuda(grad, args.take(1), results[1],
                              {.adds = main_grad.adds, .grad_bias = results[2]});
  results[0] = linear_input_gradient_cuda(grad, weight);
}

Tensors backward_unfused(const Args& args) {
  const Tensor& grad = args.tensor(0);
  Tensors grads = linear_backward_unfused(grad, args.tensor(1), args.tensor(2));
  grads.push_back(grad.sum_to_size_symint({grad.sym_size(-1)}));
  return grads;
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
             // After the rules that spare a pass over the gradient.
             .benefit = 5,
             .pattern = {{"BasicLinear"}, {"Bias"}},
             .why_not = why_not},
    .backward = {.schema = "bias_linear_backward(Tensor grad_output, Tensor input, Tensor weight) "
                           "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = shape,
                 .any_strides = {"input", "weight"},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .allocates = false,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
