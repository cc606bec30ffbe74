// PackedLinear: y = x [W0; W1; ...]^T + [b0, b1, ...]. The weights are never concatenated.
#include "wrappers/packed_linear.h"

#include <numeric>

#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops::ops::packed_linear {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensors& weight,
                          const Tensors& bias, std::vector<int64_t> out_features) {
  return {packed_linear_output(check, input, weight, bias, out_features)};
}

Tensor forward_cpu(const Tensor& input, const Tensors& weight, const Tensors& bias,
                   std::vector<int64_t> out_features) {
  return packed_linear_cpu(input, weight, bias, out_features);
}

Tensor forward_cuda(const Tensor& input, const Tensors& weight, const Tensors& bias,
                    std::vector<int64_t> out_features) {
  return packed_linear_cuda(input, weight, bias, out_features);
}

Tensor forward_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias,
                          std::vector<int64_t>) {
  return packed_linear_decomposed(input, weight, bias);
}

PackedBackward backward_cpu(const Call& call, const Tensor& grad_output,
                            std::optional<Tensor> input, const Tensors& weight,
                            std::vector<int64_t> out_features, PackedMask wanted) {
  return packed_linear_backward_cpu(grad_output, std::move(input), weight, out_features, wanted,
                                    call.main_grad());
}

PackedBackward backward_cuda(const Call& call, const Tensor& grad_output,
                             std::optional<Tensor> input, const Tensors& weight,
                             std::vector<int64_t> out_features, PackedMask wanted) {
  return packed_linear_backward_cuda(grad_output, std::move(input), weight, out_features, wanted,
                                     call.main_grad());
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensors& weight, std::vector<int64_t> out_features,
                           PackedMask wanted) {
  return packed_linear_backward_outputs(check, grad_output, input, weight, out_features, wanted);
}

PackedBackward backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                   const Tensors& weight, std::vector<int64_t> out_features,
                                   PackedMask wanted) {
  return packed_linear_backward_decomposed(grad_output, input, weight, out_features, wanted);
}

const TypedOp kForward = {.schema =
                              "packed_linear(Tensor input, Tensor[] weight, Tensor[] bias, "
                              "int[] out_features) -> Tensor output",
                          .shape = forward_shape,
                          .any_strides = {"input", "weight"},
                          .products = {.list = {{"weight"}}},
                          .bodies = {forward_cpu, forward_cuda, forward_decomposed}};

[[maybe_unused]] const bool registered = register_op({
    .declaration =
        {.kind = "PackedLinear",
         .summary = "x [weight0; weight1; ...]^T + [bias0, bias1, ...] over the last dimension",
         .parameters = {"weight", "bias"},
         .lists = {{"weight", "num_weights"},
                   {"bias", "num_weights", /*single=*/{}, /*optional=*/true}},
         .attributes = {"in_features", "out_features", "num_weights", "accumulate_into_main_grad"},
         .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
         .states = {{"main_grad", "weight", "accumulate_into_main_grad"}},
         .dtype = DTypeRule::Parameter,
         .operands = {"input", "weight"},
         .width =
             [](const Attributes& attributes, int64_t) {
               const auto& columns = std::get<std::vector<int64_t>>(attributes.at("out_features"));
               return std::accumulate(columns.begin(), columns.end(), int64_t{0});
             }},
    .forward = kForward,
    .backward = {.schema = "packed_linear_backward(Tensor grad_output, Tensor? input, "
                           "Tensor[] weight, int[] out_features, bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor[] grad_weight, Tensor[] grad_bias)",
                 .shape = backward_shape,
                 .any_strides = {"grad_output", "input", "weight"},
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::packed_linear
