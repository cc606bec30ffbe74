// forward:  x ─► BasicLinear ─► Bias ─► y      the bias is the start of the product's sum
#include "ops/linear.h"

#include <ATen/ops/linear.h>

#include "ops/linear_cuda.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const TensorSpec output = linear_output(args);
  check_linear_bias(args, args.tensor(2), output);
  return {output};
}

void forward_cpu(const Args& args, Tensors& results) {
  results = {linear_cpu(args.tensor(0), args.tensor(1), args.tensor(2))};
}

void forward_cuda(const Args& args, Tensors& results) {
  results = {linear_cuda(args.tensor(0), args.tensor(1), args.tensor(2))};
}

Tensors forward_unfused(const Args& args) {
  return {at::linear(args.tensor(0), args.tensor(1), args.tensor(2))};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias",
             .pass = Pass::Forward,
             .benefit = 20,
             .pattern = {{"BasicLinear"}, {"Bias"}},
             .why_not = different_linear_dtypes},
    .forward = {.schema = "linear_bias(Tensor input, Tensor weight, Tensor bias) -> Tensor output",
                .shape = shape,
                .any_strides = {"input", "weight"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
