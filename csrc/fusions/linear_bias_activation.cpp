// forward:  x ─► BasicLinear ─► Bias ─► activation ─► y
//                        └────────────────┘ kept: the activation's input, or its bit mask
#include <ATen/ops/linear.h>

#include "ops/activation.h"
#include "ops/bias.h"
#include "ops/buffer.h"
#include "ops/linear.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

const ActivationRow& row_of(const Args& args) { return activation_named(args.text(3)); }

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

void forward_cpu(const Args& args, Tensors& results) {
  const ActivationRow& row = row_of(args);
  const bool save = args.flag(4);
  const Tensor sum = linear_cpu(args.tensor(0), args.tensor(1), args.tensor(2));
  const auto empty = [](at::ScalarType dtype) { return empty_cpu({0}, dtype); };
  if (row.keeps_mask) {
    Tensor mask = save ? empty_cpu({(sum.numel() + 7) / 8}, at::kByte) : empty(at::kByte);
    activation_forward_cpu(row, sum, sum, save ? mask : Tensor());
    results = {sum, mask};
  } else if (save) {
    Tensor output = empty_cpu(sum.sizes(), sum.scalar_type());
    activation_forward_cpu(row, sum, output, {});
    results = {output, sum};
  } else {
    activation_forward_cpu(row, sum, sum, {});
    results = {sum, empty(sum.scalar_type())};
  }
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
             .benefit = 30,
             .pattern = {{"BasicLinear"}, {"Bias"}, activation_kinds()},
             .why_not = different_linear_dtypes,
             .bind = bind},
    .forward = {.schema = "linear_bias_activation(Tensor input, Tensor weight, Tensor bias, "
                          "str activation, bool save_kept) -> (Tensor output, Tensor kept)",
                .shape = shape,
                .cpu = forward_cpu,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
