// forward:  x ─► BasicLinear ─► Bias ─► activation ─► y
//                        └────────────────┘ saved: the activation's input, or its bit mask
#include <ATen/ops/linear.h>

#include "op/buffer.h"
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/activation.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

namespace transformer_ops::fused::linear_bias_activation {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor& bias, std::string_view activation, bool save_kept) {
  const TensorSpec output = linear_output(check, input, weight, &bias);
  const bool mask = activation_of(check, activation).keeps_mask;
  if (!save_kept) return {output, absent(mask ? at::kByte : output.dtype)};
  if (!mask) return {output, output};
  c10::SymInt elements = 1;
  for (const auto& size : output.sizes) elements *= size;
  return {output, {{(elements + 7) / 8}, at::kByte}};
}

using Activate = void (*)(const ActivationRow&, const Tensor&, const Tensor&, const Tensor&);

// Returns (output, saved). The activation runs in a separate pass, in the memory of its input if
// that is not saved.
std::tuple<Tensor, Tensor> activated(const ActivationRow& row, const Tensor& sum, bool save_kept,
                                     Activate activate) {
  if (row.keeps_mask) {
    Tensor mask = empty({save_kept ? (sum.numel() + 7) / 8 : 0}, at::kByte, sum.device());
    activate(row, sum, sum, save_kept ? mask : Tensor());
    return {sum, mask};
  }
  Tensor output = save_kept ? empty(sum.sizes(), sum.scalar_type(), sum.device()) : sum;
  activate(row, sum, output, {});
  return {output, save_kept ? sum : empty({0}, sum.scalar_type(), sum.device())};
}

std::tuple<Tensor, Tensor> forward_cpu(const Call& call, const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, std::string_view activation,
                                       bool save_kept) {
  const auto [x, factor] = scaled_operand(input, call.scales());
  return activated(activation_of(call, activation), linear_cpu(x, weight, bias, factor), save_kept,
                   activation_forward_cpu);
}

// GELU is the only one of cuBLASLt's activations that is used. Its ReLU saves a mask whose bit
// order NVIDIA does not document, in rows of multiples of 128 bits, and may turn NaN into 0 as
// fmaxf does. On a GPU, tests/emulated/check_products.cpp shows what it does.
std::tuple<Tensor, Tensor> forward_cuda(const Call& call, const Tensor& input, const Tensor& weight,
                                        const Tensor& bias, std::string_view activation,
                                        bool save_kept) {
  const ActivationRow& row = activation_of(call, activation);
  if (row.activation == kernel::Activation::GELU) {
    Tensor kept = empty({0}, product_dtype(input), input.device());
    const auto output =
        linear_gelu_cuda(input, weight, bias, save_kept ? &kept : nullptr, call.scales());
    if (output) return {*output, kept};
  }
  const Tensor sum = linear_cuda(input, weight, bias, /*scale=*/1.0, call.scales());
  return activated(row, sum, save_kept, activation_forward_cuda);
}

Tensor forward_decomposed(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor& bias, std::string_view activation, bool) {
  return activation_of(check, activation).decomposition(at::linear(input, weight, bias));
}

// ---- the activation's input, recomputed

Tensor sum_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return linear_cpu(input, weight, bias);
}

Tensor sum_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return linear_cuda(input, weight, bias);
}

Bindings bind(const Match& match) {
  const ActivationRow& row = activation_of_kind(match.kind(2));
  return {{"activation", Attribute(row.name)},
          {"kept", Field{2, row.keeps_mask ? "mask" : "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias_activation",
             .pass = Pass::Forward,
             // runs before linear_epilogue, which would take the product and its bias
             .benefit = 48,
             .pattern = {{"BasicLinear"}, {"Bias"}, activation_kinds()},
             .why_not = different_linear_dtypes,
             .bind = bind,
             .recomputed = 1},
    .forward = {.schema = "linear_bias_activation(Tensor input, Tensor weight, Tensor bias, "
                          "str activation, bool save_kept) -> (Tensor output, Tensor kept)",
                .shape = shape,
                .any_strides = {"input", "weight"},
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .scalable = true},
    .recompute = recompute_by({.schema = "linear_bias(Tensor input, Tensor weight, Tensor bias) -> "
                                         "Tensor output",
                               .shape = linear_bias_shape,
                               .any_strides = {"input", "weight"},
                               .products = {.list = {{"weight"}}},
                               .bodies = {sum_cpu, sum_cuda, linear_bias_decomposed}}),
});

}  // namespace
}  // namespace transformer_ops::fused::linear_bias_activation
