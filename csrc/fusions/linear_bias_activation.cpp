// forward:  x ─► BasicLinear ─► Bias ─► activation ─► y
//                        └────────────────┘ kept: the activation's input, or its bit mask
#include <ATen/ops/linear.h>

#include "bodies/activation.h"
#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

const ActivationRow& row_of(const Args& args) { return activation_of(args, 3); }

TensorSpecs shape(const Args& args) {
  const TensorSpec output = linear_output(args);
  check_linear_bias(args, args.tensor(2), output);
  const bool mask = row_of(args).keeps_mask;
  if (!args.flag(4)) return {output, {{0}, mask ? at::kByte : output.dtype}};
  if (!mask) return {output, output};
  c10::SymInt elements = 1;
  for (const auto& size : output.sizes) elements *= size;
  return {output, {{(elements + 7) / 8}, at::kByte}};
}

using Activate = void (*)(const ActivationRow&, const Tensor&, const Tensor&, const Tensor&);

// The activation in a pass of its own, in the memory of its input where that is not kept.
Tensors activated(const Args& args, const Tensor& sum, Activate activate) {
  const ActivationRow& row = row_of(args);
  const bool save = args.flag(4);
  if (row.keeps_mask) {
    Tensor mask = empty({save ? (sum.numel() + 7) / 8 : 0}, at::kByte, sum.device());
    activate(row, sum, sum, save ? mask : Tensor());
    return {sum, mask};
  }
  Tensor output = save ? empty(sum.sizes(), sum.scalar_type(), sum.device()) : sum;
  activate(row, sum, output, {});
  return {output, save ? sum : empty({0}, sum.scalar_type(), sum.device())};
}

void forward_cpu(const Args& args, Tensors& results) {
  const Tensor sum = linear_cpu(args.tensor(0), args.tensor(1), args.tensor(2));
  results = activated(args, sum, activation_forward_cpu);
}

// Of cuBLASLt's activations, GELU alone: its ReLU keeps a mask whose order of bits NVIDIA does not
// document, in rows of multiples of 128 bits, and may turn NaN into 0 as fmaxf does. On a GPU
// tests/emulated/check_products.cpp says what they are.
void forward_cuda(const Args& args, Tensors& results) {
  if (row_of(args).activation == kernel::Activation::GELU) {
    Tensor kept = empty({0}, args.tensor(0).scalar_type(), args.tensor(0).device());
    const auto output = linear_gelu_cuda(args.tensor(0), args.tensor(1), args.tensor(2),
                                         args.flag(4) ? &kept : nullptr);
    if (output) {
      results = {*output, kept};
      return;
    }
  }
  const Tensor sum = linear_cuda(args.tensor(0), args.tensor(1), args.tensor(2));
  results = activated(args, sum, activation_forward_cuda);
}

Tensors forward_unfused(const Args& args) {
  return {row_of(args).unfused(at::linear(args.tensor(0), args.tensor(1), args.tensor(2)))};
}

Bindings bind(const Match& match) {
  const ActivationRow& row = activation_of_kind(match.kind(2));
  return {{"activation", Attribute(row.name)},
          {"kept", Field{2, row.keeps_mask ? "mask" : "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias_activation",
             .pass = Pass::Forward,
             // Before linear_epilogue, which would take the product and its bias.
             .benefit = 48,
             .pattern = {{"BasicLinear"}, {"Bias"}, activation_kinds()},
             .why_not = different_linear_dtypes,
             .bind = bind},
    .forward = {.schema = "linear_bias_activation(Tensor input, Tensor weight, Tensor bias, "
                          "str activation, bool save_kept) -> (Tensor output, Tensor kept)",
                .shape = shape,
                .any_strides = {"input", "weight"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
