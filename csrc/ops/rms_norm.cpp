// RMSNorm: y = x * rstd * gamma over the trailing dimensions, rstd = 1 / sqrt(mean(x^2) + eps).
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>

#include <numeric>

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
  check_trailing(args, "input", input, weight);
  return {like(input), row_statistics(input, weight.dim())};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(1).numel()};
  const Tensor gamma = cpu::to_accumulate(args.tensor(1), x.tensor, args.flag(3) ? 1.0 : 0.0);
  const cpu::Rows y{results[0], x.width}, rstd{results[1], 1};
  // Rows without elements have statistics too.
  cpu::parallel(rstd.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::rms_norm_forward(cpu::kernel_dtype(x.tensor), x.read(begin), gamma.const_data_ptr(),
                          args.number(2), y.write(begin), rstd.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  cuda::norm_forward(cuda::stream_of(x), {.norm = cuda::Norm::RMSNorm,
                                          .dtype = kernel_dtype(x),
                                          .x = cuda::read(x),
                                          .gamma = cuda::vector(weight, args.flag(3) ? 1.0 : 0.0),
                                          .eps = args.number(2),
                                          .y = cuda::write(results[0]),
                                          .rstd = cuda::write(results[1]),
                                          .rows = results[1].numel(),
                                          .h = weight.numel()});
}

Tensors forward_unfused(const Args& args) {
  const Tensor x = to_accumulate(args.tensor(0));
  const Tensor weight = args.tensor(1).to(x.scalar_type());
  std::vector<int64_t> dims(weight.dim());
  std::iota(dims.begin(), dims.end(), -weight.dim());
  const Tensor squares = at::mean(x.square(), dims, /*keepdim=*/true);
  const Tensor y = x * at::rsqrt(squares + args.number(2)) * (args.flag(3) ? weight + 1 : weight);
  return {y.to(args.tensor(0).scalar_type())};
}

TensorSpecs backward_shape(const Args& args) {
  const Tensor& input = args.tensor(1);
  const Tensor& weight = args.tensor(3);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "weight", weight);
  check_trailing(args, "input", input, weight);
  check_spec(args, "grad_output", args.tensor(0), like(input));
  check_spec(args, "rstd", args.tensor(2), row_statistics(input, weight.dim()));
  return {like(input), like(weight)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& weight = args.tensor(3);
  const cpu::Rows x{args.tensor(1), weight.numel()};
  const cpu::Rows grad{args.tensor(0), x.width}, rstd{args.tensor(2), 1};
  const Tensor gamma = cpu::to_accumulate(weight, x.tensor, args.flag(5) ? 1.0 : 0.0);
  const cpu::Rows grad_x{results[0], x.width};
  cpu::sum_rows(x.count(), x.width, x.tensor, std::span(results).subspan(1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::rms_norm_backward(cpu::kernel_dtype(x.tensor), grad.read(begin),
                                         x.read(begin), rstd.read(begin), gamma.const_data_ptr(),
                                         grad_x.write(begin), sums[0], end - begin, x.width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(1), &rstd = args.tensor(2), &weight = args.tensor(3);
  cuda::run_norm_backward(x, {.norm = cuda::Norm::RMSNorm,
                              .dtype = kernel_dtype(x),
                              .grad_y = cuda::read(args.tensor(0)),
                              .x = cuda::read(x),
                              .rstd = cuda::read(rstd),
                              .gamma = cuda::vector(weight, args.flag(5) ? 1.0 : 0.0),
                              .residual_dtype = kernel_dtype(x),
                              .grad_x = cuda::write(results[0]),
                              .grad_gamma = cuda::gradient(results[1]),
                              .rows = rstd.numel(),
                              .h = weight.numel()});
}

NormTensors recompute_tensors(const Args& args) {
  return {args.tensor(1), nullptr, args.tensor(2), &args.tensor(3), nullptr, args.flag(4)};
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "RMSNorm",
                    .summary = "x * rstd * gamma over the trailing dimensions",
                    .parameters = {"weight"},
                    .attributes = {"normalized_shape", "eps", "zero_centered_gamma"},
                    .slots = {{"input"}, {"rstd"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "rms_norm(Tensor input, Tensor weight, float eps, "
                          "bool zero_centered_gamma) -> (Tensor output, Tensor rstd)",
                .shape = forward_shape,
                .overwrites = {0},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused},
    .backward = {.schema = "rms_norm_backward(Tensor grad_output, Tensor input, Tensor rstd, "
                           "Tensor weight, float eps, bool zero_centered_gamma) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .overwrites = {0, 1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda},
    .recompute = recompute_norm("recompute_rms_norm(Tensor grad_output, Tensor input, Tensor rstd, "
                                "Tensor weight, bool zero_centered_gamma) -> Tensor output",
                                recompute_tensors),
});

}  // namespace
}  // namespace transformer_ops
