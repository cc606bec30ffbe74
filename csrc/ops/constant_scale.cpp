// ConstantScale: y = x * scale, in both passes.
#include <ATen/ScalarOps.h>
#include <ATen/ops/mul.h>

#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  return {like(args.tensor(0))};
}

TensorSpecs backward_shape(const Args& args) {
  check_compute_dtype(args, "grad_output", args.tensor(0));
  return {like(args.tensor(0))};
}

void multiply(const Args& args, Tensors& results) {
  at::mul_out(results[0], args.tensor(0), at::native::wrapped_scalar_tensor(args.number(1)));
}

Tensors multiply_unfused(const Args& args) { return {args.tensor(0) * args.number(1)}; }

const TypedOp kForward = {.schema = "constant_scale(Tensor input, float scale) -> Tensor output",
                          .shape = forward_shape,
                          .overwrites = {0},
                          .cpu = multiply,
                          .cuda = multiply,
                          .unfused = multiply_unfused};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "ConstantScale",
                    .summary = "x * scale",
                    .attributes = {"scale"},
                    .inactive = [](const Attributes& attributes,
                                   bool) { return std::get<double>(attributes.at("scale")) == 1; }},
    .forward = kForward,
    .backward = {.schema = "constant_scale_backward(Tensor grad_output, float scale) -> "
                           "Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {0},
                 .cpu = multiply,
                 .cuda = multiply,
                 .unfused = multiply_unfused},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops
