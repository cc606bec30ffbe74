// LayerNorm: y = (x - mean) * rstd * gamma + beta over the trailing dimensions.
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/zeros_like.h>

#include "bodies/cpu.h"
#include "bodies/norm_cuda.h"
#include "bodies/recompute_norm.h"
#include "kernels/norm.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) {
  const Tensor& input = args.tensor(0);
  const Tensor& weight = args.tensor(1);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "weight", weight);
  check_compute_dtype(args, "bias", args.tensor(2));
  check_trailing(args, "input", input, weight);
  check_same_sizes(args, "bias", args.tensor(2), weight);
  return {like(input), row_statistics(input, weight.dim()), row_statistics(input, weight.dim())};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(1).numel()};
  const Tensor gamma = cpu::to_accumulate(args.tensor(1), x.tensor, args.flag(4) ? 1.0 : 0.0);
  const Tensor beta = cpu::to_accumulate(args.tensor(2), x.tensor);
  const cpu::Rows y{results[0], x.width}, mean{results[1], 1}, rstd{results[2], 1};
  // Rows without elements have statistics too.
  cpu::parallel(rstd.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::layer_norm_forward(cpu::kernel_dtype(x.tensor), x.read(begin), gamma.const_data_ptr(),
                            beta.const_data_ptr(), args.number(3), y.write(begin),
                            mean.write(begin), rstd.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  cuda::norm_forward(cuda::stream_of(x), {.norm = cuda::Norm::LayerNorm,
                                          .dtype = kernel_dtype(x),
                                          .x = cuda::read(x),
                                          .gamma = cuda::vector(weight, args.flag(4) ? 1.0 : 0.0),
                                          .beta = cuda::vector(args.tensor(2)),
                                          .eps = args.number(3),
                                          .y = cuda::write(results[0]),
                                          .mean = cuda::write(results[1]),
                                          .rstd = cuda::write(results[2]),
                                          .rows = results[2].numel(),
                                          .h = weight.numel()});
}

Tensors forward_unfused(const Args& args) {
  const Tensor x = to_accumulate(args.tensor(0));
  const Tensor weight = args.tensor(1).to(x.scalar_type());
  const Tensor y = at::layer_norm_symint(x, weight.sym_sizes(), args.flag(4) ? weight + 1 : weight,
                                         args.tensor(2).to(x.scalar_type()), args.number(3));
  return {y.to(args.tensor(0).scalar_type())};
}

// beta does not reach the backward op: its gradient does not depend on it.
Tensors backward_unfused(const Args& args) {
  const Tensor& weight = args.tensor(4);
  const Tensors grads =
      differentiate(forward_unfused, args.op(),
                    {args[1], weight, at::zeros_like(weight), args[5], args[6]}, args.tensor(0));
  return {grads[0], grads[1], grads[2]};
}

TensorSpecs backward_shape(const Args& args) {
  const Tensor& input = args.tensor(1);
  const Tensor& weight = args.tensor(4);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "weight", weight);
  check_trailing(args, "input", input, weight);
  check_spec(args, "grad_output", args.tensor(0), like(input));
  check_spec(args, "mean", args.tensor(2), row_statistics(input, weight.dim()));
  check_spec(args, "rstd", args.tensor(3), row_statistics(input, weight.dim()));
  return {like(input), like(weight), like(weight)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(1), args.tensor(4).numel()};
  const cpu::Rows grad{args.tensor(0), x.width}, mean{args.tensor(2), 1}, rstd{args.tensor(3), 1};
  const Tensor gamma = cpu::to_accumulate(args.tensor(4), x.tensor, args.flag(6) ? 1.0 : 0.0);
  const cpu::Rows grad_x{results[0], x.width};
  cpu::sum_rows(x.count(), x.width, x.tensor, std::span(results).subspan(1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::layer_norm_backward(cpu::kernel_dtype(x.tensor), grad.read(begin),
                                           x.read(begin), mean.read(begin), rstd.read(begin),
                                           gamma.const_data_ptr(), grad_x.write(begin), sums[0],
                                           sums[1], end - begin, x.width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(1), &rstd = args.tensor(3), &weight = args.tensor(4);
  cuda::run_norm_backward(x, {.norm = cuda::Norm::LayerNorm,
                              .dtype = kernel_dtype(x),
                              .grad_y = cuda::read(args.tensor(0)),
                              .x = cuda::read(x),
                              .mean = cuda::read(args.tensor(2)),
                              .rstd = cuda::read(rstd),
                              .gamma = cuda::vector(weight, args.flag(6) ? 1.0 : 0.0),
                              .residual_dtype = kernel_dtype(x),
                              .grad_x = cuda::write(results[0]),
                              .grad_gamma = cuda::gradient(results[1]),
                              .grad_beta = cuda::gradient(results[2]),
                              .rows = rstd.numel(),
                              .h = weight.numel()});
}

NormTensors recompute_tensors(const Args& args) {
  return {args.tensor(1),  &args.tensor(2), args.tensor(3),
          &args.tensor(4), &args.tensor(5), args.flag(6)};
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "LayerNorm",
                    .summary = "(x - mean) * rstd * gamma + beta over the trailing dimensions",
                    .parameters = {"weight", "bias"},
                    .attributes = {"normalized_shape", "eps", "zero_centered_gamma"},
                    .slots = {{"input"}, {"mean"}, {"rstd"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "layer_norm(Tensor input, Tensor weight, Tensor bias, float eps, "
                          "bool zero_centered_gamma) -> (Tensor output, Tensor mean, Tensor rstd)",
                .shape = forward_shape,
                .overwrites = {0},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused},
    .backward = {.schema = "layer_norm_backward(Tensor grad_output, Tensor input, Tensor mean, "
                           "Tensor rstd, Tensor weight, float eps, bool zero_centered_gamma) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = backward_shape,
                 .overwrites = {0, 1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
    .recompute = recompute_norm(
        "recompute_layer_norm(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, "
        "Tensor weight, Tensor bias, bool zero_centered_gamma) -> Tensor output",
        recompute_tensors),
});

}  // namespace
}  // namespace transformer_ops
