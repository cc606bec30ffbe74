// ConstantScale: y = x * scale, in both passes.
#include <ATen/ScalarOps.h>
#include <ATen/ops/mul.h>

#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops::ops::constant_scale {
namespace {

void multiply(const Tensor& tensor, double scale, Tensor& result) {
  at::mul_out(result, tensor, at::native::wrapped_scalar_tensor(scale));
}

Tensor multiply_decomposed(const Tensor& tensor, double scale) { return tensor * scale; }

const TypedOp kForward = {.schema = "constant_scale(Tensor input, float scale) -> Tensor output",
                          .overwrites = {"input"},
                          .bodies = {multiply, multiply, multiply_decomposed},
                          .by_rows = {"input"}};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "ConstantScale",
                    .summary = "x * scale",
                    .attributes = {"scale"},
                    .inactive = [](const Attributes& attributes,
                                   bool) { return std::get<double>(attributes.at("scale")) == 1; }},
    .forward = kForward,
    .backward = {.schema = "constant_scale_backward(Tensor grad_output, float scale) -> "
                           "Tensor grad_input",
                 .overwrites = {"grad_output"},
                 .bodies = {multiply, multiply, multiply_decomposed},
                 .by_rows = {"grad_output"}},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::constant_scale
