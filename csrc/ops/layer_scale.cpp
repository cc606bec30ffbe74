// LayerScale: y = x * gamma over the last dimension.
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/row_scale.h"

namespace transformer_ops::ops::layer_scale {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& gamma) {
  check_gamma(check, input, &gamma);
  return {like(input)};
}

void forward_cpu(const Tensor& input, const Tensor& gamma, Tensor& output) {
  scale_rows_cpu(input, &gamma, {}, nullptr, output);
}

void forward_cuda(const Tensor& input, const Tensor& gamma, Tensor& output) {
  scale_rows_cuda(input, &gamma, {}, nullptr, output);
}

Tensor forward_decomposed(const Tensor& input, const Tensor& gamma) {
  return scale_rows_decomposed(input, &gamma, {});
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor& gamma, ScaleMask wanted) {
  return scale_backward_shape(check, grad_output, input, &gamma, wanted);
}

void backward_cpu(const Tensor& grad_output, const Tensor* input, const Tensor& gamma,
                  ScaleMask wanted, Tensor& grad_input, Tensor& grad_gamma) {
  scale_backward_cpu(grad_output, input, &gamma, {}, wanted, grad_input, grad_gamma);
}

void backward_cuda(const Tensor& grad_output, const Tensor* input, const Tensor& gamma,
                   ScaleMask wanted, Tensor& grad_input, Tensor& grad_gamma) {
  scale_backward_cuda(grad_output, input, &gamma, {}, wanted, grad_input, grad_gamma);
}

std::tuple<Tensor, Tensor> backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                               const Tensor& gamma, ScaleMask wanted) {
  return scale_backward_decomposed(grad_output, input, &gamma, {}, wanted);
}

const TypedOp kForward = {.schema = "layer_scale(Tensor input, Tensor gamma) -> Tensor output",
                          .shape = forward_shape,
                          .overwrites = {"input"},
                          .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                          .by_rows = {"input"}};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "LayerScale",
                    .summary = "x * gamma over the last dimension",
                    .parameters = {"gamma"},
                    .attributes = {"size"},
                    .slots = {{"input", {"gamma"}}}},
    .forward = kForward,
    .backward = {.schema = "layer_scale_backward(Tensor grad_output, Tensor? input, Tensor gamma, "
                           "bool[2] output_mask) -> (Tensor grad_input, Tensor grad_gamma)",
                 .shape = backward_shape,
                 .overwrites = {"grad_output"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::layer_scale
