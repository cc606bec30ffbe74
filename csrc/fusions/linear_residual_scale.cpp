// backward:  g ─► [ConstantScale'] ─► BasicLinear' ─► [(+)] ─► g
//                    g of the extra output ─────────────┘
//
// The products scale, so there is no pass over g, and the one that gives the input's gradient adds
// onto the residual's.
#include <ATen/ops/add.h>

#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "bodies/make_extra_output.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  TensorSpecs specs = linear_backward_outputs(args, 0, 2, 3, 5);
  if (args.has(1)) {
    specs[0] = with_extra_gradient(args, specs[0], args.tensor(1), args.flag(5, 0));
  }
  return specs;
}

using Product = Tensors (*)(const Tensor&, Tensor, const Tensor&, const LinearGradients&);

// `adds`: may the product start from the residual?
Tensors backward(const Args& args, Product product, bool adds) {
  const Tensor residual = args.optional(1);
  const double scale = factor_of(args.tensor(0).scalar_type(), args.number(4));
  // A product that is scaled by zero is not computed, and NaN would not pass.
  const Tensor grad = scale == 0 ? args.tensor(0) * scale : args.tensor(0);
  Tensors grads = product(grad, args.flag(5, 1) ? args.take(2) : Tensor(),
                          args.flag(5, 0) ? args.tensor(3) : Tensor(),
                          {.scale = scale == 0 ? 1.0 : scale,
                           .residual = adds ? residual : Tensor(),
                           .main_grad = args.main_grad()});
  if (residual.defined() && !adds) grads[0] = at::add(grads[0], residual);
  return grads;
}

void backward_cpu(const Args& args, Tensors& results) {
  const auto dtype = args.tensor(0).scalar_type();
  const bool adds = args.has(1) && args.tensor(1).scalar_type() == dtype;
  results = backward(args, linear_backward_cpu, adds);
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  const bool adds =
      args.has(1) && (args.tensor(1).scalar_type() == grad.scalar_type() ||
                      (args.tensor(1).scalar_type() == at::kFloat && grad.element_size() == 2));
  results = backward(args, linear_backward_cuda, adds);
}

Tensors backward_unfused(const Args& args) {
  const double scale = args.number(4);
  Tensors grads = linear_backward_unfused(scale == 1 ? args.tensor(0) : args.tensor(0) * scale,
                                          args.flag(5, 1) ? args.tensor(2) : Tensor(),
                                          args.flag(5, 0) ? args.tensor(3) : Tensor());
  if (args.has(1)) grads[0] = grads[0] + args.tensor(1);
  return grads;
}

std::optional<std::string> why_not(const Match& match) {
  if (match.has(2) && std::get<double>(match.op(2).attributes.at("scale")) == 0) {
    return "the scale is 0, with which a product may hide NaN and infinity";
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
             .bind = bind},
    .backward = {.schema = "linear_residual_scale_backward(Tensor grad_output, "
                           "Tensor? grad_extra_output, Tensor? input, Tensor? weight, "
                           "float scale, bool[2] output_mask) -> "
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
