// joint:  x ─► ReLU or SReLU ─► y ─► BasicLinear ─► z      keeps y alone, which the Linear keeps
//         anyway: the activation's gradient follows from its output.
#include "bodies/activation.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "kernels/activation.h"
#include "op/op.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sqrt.h>

namespace transformer_ops {
namespace {

// The activation that argument i names; raises where its gradient does not follow from its output.
const ActivationRow& row_of(const Args& args, size_t i) {
  const ActivationRow& row = activation_of(args, i);
  TORCH_CHECK(row.activation == cpu::Activation::ReLU || row.activation == cpu::Activation::SReLU,
              "[", args.op(), "] activation must be relu or srelu, got '", row.name, "'");
  return row;
}

TensorSpecs forward_shape(const Args& args) {
  row_of(args, 2);
  return {linear_output(args), like(args.tensor(0))};
}

void forward_cpu(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(0);
  Tensor activated = empty_cpu(input.sizes(), input.scalar_type());
  activation_forward_cpu(row_of(args, 2), input, activated, {});
  results = {linear_cpu(activated, args.tensor(1)), activated};
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(0);
  const Tensor activated = empty(input.sizes(), input.scalar_type(), input.device());
  activation_forward_cuda(row_of(args, 2), input, activated, {});
  results = {linear_cuda(activated, args.tensor(1)), activated};
}

Tensors forward_unfused(const Args& args) {
  const Tensor activated = row_of(args, 2).unfused(args.tensor(0));
  return {at::linear(activated, args.tensor(1)), activated};
}

TensorSpecs backward_shape(const Args& args) {
  row_of(args, 3);
  TensorSpecs specs = linear_backward_outputs(args, 0, 1, 2, 4, "activated");
  if (args.flag(4, 0)) check_spec(args, "activated", args.tensor(1), specs[0]);
  return specs;
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& activated = args.tensor(1);
  const Tensor weight = args.flag(4, 0) ? args.tensor(2) : Tensor();
  results = linear_backward_cpu(args.tensor(0), args.flag(4, 1) ? activated : Tensor(), weight,
                                {.main_grad = args.main_grad()});
  if (!weight.defined()) return;
  const ActivationRow& row = row_of(args, 3);
  const cpu::Rows grad{results[0], 1}, y{activated, 1};
  cpu::parallel(grad.count(), 1, 1, [&](int64_t begin, int64_t end) {
    cpu::activation_backward_from_output(row.activation, cpu::kernel_dtype(activated),
                                         grad.read(begin), y.read(begin), grad.write(begin),
                                         end - begin);
  });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& activated = args.tensor(1);
  const Tensor weight = args.flag(4, 0) ? args.tensor(2) : Tensor();
  results = linear_backward_cuda(args.tensor(0), args.flag(4, 1) ? activated : Tensor(), weight,
                                 {.main_grad = args.main_grad()});
  if (!weight.defined()) return;
  cuda::activation_backward_from_output(
      cuda::stream_of(activated), row_of(args, 3).activation, kernel_dtype(activated),
      cuda::read(results[0]), cuda::read(activated), cuda::write(results[0]), activated.numel());
}

Tensors backward_unfused(const Args& args) {
  const Tensor& y = args.tensor(1);
  const bool squared = row_of(args, 3).activation == cpu::Activation::SReLU;
  const Tensor slope = squared ? 2 * at::sqrt(y) : (y > 0).to(y.scalar_type());
  Tensors results(2);
  if (args.flag(4, 0)) results[0] = at::matmul(args.tensor(0), args.tensor(2)) * slope;
  if (args.flag(4, 1)) results[1] = as_matrix(args.tensor(0)).t().mm(as_matrix(y));
  return results;
}

std::optional<std::string> why_not(const Match& match) {
  if (!match.key().grad_enabled) return "no gradient is wanted";
  if (match.parameter_requires_grad(1, 0)) return std::nullopt;
  return "the weight needs no gradient, so the Linear keeps no input";
}

Bindings bind(const Match& match) {
  return {{"activation", Attribute(activation_of_kind(match.kind(0)).name)},
          {"activated", Field{1, "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "activation_linear",
             .pass = Pass::Joint,
             .benefit = 10,
             .pattern = {{"ReLU", "SReLU"}, {"BasicLinear"}},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema = "activation_linear(Tensor input, Tensor weight, str activation) -> "
                          "(Tensor output, Tensor activated)",
                .shape = forward_shape,
                .any_strides = {"weight"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
    .backward = {.schema = "activation_linear_backward(Tensor grad_output, Tensor activated, "
                           "Tensor? weight, str activation, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .any_strides = {"grad_output", "weight"},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .allocates = false,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
