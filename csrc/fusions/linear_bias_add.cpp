// forward:  x ─► BasicLinear ─► Bias ─► AddExtraInput ─► y
//                                            ▲ residual
#include <ATen/ops/linear.h>

#include "ops/add_extra_input.h"
#include "ops/linear.h"
#include "ops/linear_add.h"
#include "ops/linear_cuda.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const TensorSpec output = linear_output(args);
  check_linear_bias(args, args.tensor(2), output);
  check_extra_input(args, args.tensor(3), output);
  return {output};
}

void forward_cpu(const Args& args, Tensors& results) {
  results = {linear_add_cpu(args.tensor(0), args.tensor(1), args.tensor(2), args.tensor(3))};
}

void forward_cuda(const Args& args, Tensors& results) {
  results = {linear_add_cuda(args.tensor(0), args.tensor(1), args.tensor(2), args.tensor(3))};
}

Tensors forward_unfused(const Args& args) {
  return {at::linear(args.tensor(0), args.tensor(1), args.tensor(2)) + args.tensor(3)};
}

std::optional<std::string> why_not(const Match& match) {
  if (auto reason = different_linear_dtypes(match)) return reason;
  return different_summands(match, 2);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias_add",
             .pass = Pass::Forward,
             // Before add_*_norm: in the product the residual costs least.
             .benefit = 45,
             .pattern = {{"BasicLinear"}, {"Bias"}, {"AddExtraInput"}},
             .why_not = why_not},
    .forward = {.schema = "linear_bias_add(Tensor input, Tensor weight, Tensor bias, "
                          "Tensor extra_input) -> Tensor output",
                .shape = shape,
                .any_strides = {"input", "weight", "extra_input"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
