// BasicLinear: y = x W^T. The product itself is PyTorch's (MKL or oneDNN), or cuBLASLt's.
#include <ATen/ops/linear.h>

#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) { return {linear_output(args)}; }

void forward_cpu(const Args& args, Tensors& results) {
  results = {linear_cpu(args.tensor(0), args.tensor(1))};
}

void forward_cuda(const Args& args, Tensors& results) {
  results = {linear_cuda(args.tensor(0), args.tensor(1))};
}

Tensors forward_unfused(const Args& args) { return {at::linear(args.tensor(0), args.tensor(1))}; }

TensorSpecs backward_shape(const Args& args) { return linear_backward_outputs(args, 0, 1, 2, 3); }

void backward_cpu(const Args& args, Tensors& results) {
  results = linear_backward_cpu(args.tensor(0), args.flag(3, 1) ? args.take(1) : Tensor(),
                                args.flag(3, 0) ? args.tensor(2) : Tensor(),
                                {.main_grad = args.main_grad()});
}

void backward_cuda(const Args& args, Tensors& results) {
  results = linear_backward_cuda(args.tensor(0), args.flag(3, 1) ? args.take(1) : Tensor(),
                                 args.flag(3, 0) ? args.tensor(2) : Tensor(),
                                 {.main_grad = args.main_grad()});
}

Tensors backward_unfused(const Args& args) {
  return linear_backward_unfused(args.tensor(0), args.flag(3, 1) ? args.tensor(1) : Tensor(),
                                 args.flag(3, 0) ? args.tensor(2) : Tensor());
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "BasicLinear",
                    .summary = "x W^T over the last dimension",
                    .parameters = {"weight"},
                    .attributes = {"in_features", "out_features", "accumulate_into_main_grad"},
                    .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
                    .dtype = DTypeRule::Parameter,
                    .width =
                        [](const Attributes& attributes, int64_t) {
                          return std::get<int64_t>(attributes.at("out_features"));
                        }},
    .forward = {.schema = "linear(Tensor input, Tensor weight) -> Tensor output",
                .shape = forward_shape,
                .any_strides = {"input", "weight"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
    .backward = {.schema = "linear_backward(Tensor grad_output, Tensor? input, Tensor? weight, "
                           "bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .any_strides = {"grad_output", "input", "weight"},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .allocates = false,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
