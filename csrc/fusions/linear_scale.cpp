// backward:  g ─► ConstantScale' ─► BasicLinear' ─► g      the products scale: no pass over g
#include "ops/linear.h"
#include "ops/linear_cuda.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) { return linear_backward_outputs(args, 0, 1, 2, 4); }

using Product = Tensors (*)(const Tensor&, Tensor, const Tensor&, const LinearGradients&);

Tensors backward(const Args& args, Product product) {
  const double scale = factor_of(args.tensor(0).scalar_type(), args.number(3));
  // A product that is scaled by zero is not computed, and NaN would not pass.
  const Tensor grad = scale == 0 ? args.tensor(0) * scale : args.tensor(0);
  return product(grad, args.flag(4, 1) ? args.take(1) : Tensor(),
                 args.flag(4, 0) ? args.tensor(2) : Tensor(),
                 {.scale = scale == 0 ? 1.0 : scale, .main_grad = args.main_grad()});
}

void backward_cpu(const Args& args, Tensors& results) {
  results = backward(args, linear_backward_cpu);
}

void backward_cuda(const Args& args, Tensors& results) {
  results = backward(args, linear_backward_cuda);
}

Tensors backward_unfused(const Args& args) {
  return linear_backward_unfused(args.tensor(0) * args.number(3),
                                 args.flag(4, 1) ? args.tensor(1) : Tensor(),
                                 args.flag(4, 0) ? args.tensor(2) : Tensor());
}

std::optional<std::string> why_not(const Match& match) {
  if (std::get<double>(match.op(1).attributes.at("scale")) != 0) return std::nullopt;
  return "the scale is 0, with which a product may hide NaN and infinity";
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_scale",
             .pass = Pass::Backward,
             .benefit = 10,
             .pattern = {{"BasicLinear"}, {"ConstantScale"}},
             .why_not = why_not},
    .backward = {.schema = "linear_scale_backward(Tensor grad_output, Tensor? input, "
                           "Tensor? weight, float scale, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = shape,
                 .any_strides = {"grad_output", "input", "weight"},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .allocates = false,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
