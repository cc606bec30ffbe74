// forward:  x ─► BasicLinear ─► ConstantScale ─► AddExtraInput ─► y      the scale is the product's
//                                                     ▲ residual
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
  check_extra_input(args, args.tensor(2), output);
  return {output};
}

double scale_of(const Args& args) {
  return factor_of(args.tensor(0).scalar_type(), args.number(3));
}

void forward_cpu(const Args& args, Tensors& results) {
  results = {
      linear_add_cpu(args.tensor(0), args.tensor(1), /*bias=*/{}, args.tensor(2), scale_of(args))};
}

void forward_cuda(const Args& args, Tensors& results) {
  results = {
      linear_add_cuda(args.tensor(0), args.tensor(1), /*bias=*/{}, args.tensor(2), scale_of(args))};
}

Tensors forward_unfused(const Args& args) {
  return {at::linear(args.tensor(0), args.tensor(1)) * args.number(3) + args.tensor(2)};
}

std::optional<std::string> why_not(const Match& match) { return different_summands(match, 2); }

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_scale_add",
             .pass = Pass::Forward,
             // Before add_*_norm: in the product the residual costs least.
             .benefit = 45,
             .pattern = {{"BasicLinear"}, {"ConstantScale"}, {"AddExtraInput"}},
             .why_not = why_not},
    .forward = {.schema = "linear_scale_add(Tensor input, Tensor weight, Tensor extra_input, "
                          "float scale) -> Tensor output",
                .shape = shape,
                .any_strides = {"input", "weight", "extra_input"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
