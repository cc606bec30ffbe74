// backward:       g ─► BasicLinear' ─► (+) ─► g      the product adds onto the residual's gradient
//      g of the extra output ───────────┘
#include <ATen/ops/add.h>

#include "ops/buffer.h"
#include "ops/linear.h"
#include "ops/linear_cuda.h"
#include "ops/make_extra_output.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  TensorSpecs specs = linear_backward_outputs(args, 0, 2, 3, 4);
  specs[0] = with_extra_gradient(args, specs[0], args.tensor(1), args.flag(4, 0));
  return specs;
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  const Tensor& extra = args.tensor(1);
  const bool same_dtype = extra.scalar_type() == grad.scalar_type();
  results = linear_backward_cpu(
      grad, args.flag(4, 1) ? args.take(2) : Tensor(), args.tensor(3),
      {.residual = same_dtype ? extra : Tensor(), .main_grad = args.main_grad()});
  if (!same_dtype) results[0] = at::add(results[0], extra);
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  const Tensor& extra = args.tensor(1);
  const bool takes_extra = extra.scalar_type() == grad.scalar_type() ||
                           (extra.scalar_type() == at::kFloat && grad.element_size() == 2);
  results = linear_backward_cuda(
      grad, args.flag(4, 1) ? args.take(2) : Tensor(), args.tensor(3),
      {.residual = takes_extra ? extra : Tensor(), .main_grad = args.main_grad()});
  if (!takes_extra) results[0] = at::add(results[0], extra);
}

Tensors backward_unfused(const Args& args) {
  Tensors grads = linear_backward_unfused(
      args.tensor(0), args.flag(4, 1) ? args.tensor(2) : Tensor(), args.tensor(3));
  grads[0] = grads[0] + args.tensor(1);
  return grads;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_residual",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"MakeExtraOutput"}, {"BasicLinear"}},
             .why_not = no_extra_gradient},
    .backward = {.schema = "linear_residual_backward(Tensor grad_output, "
                           "Tensor grad_extra_output, Tensor? input, Tensor? weight, "
                           "bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)",
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
