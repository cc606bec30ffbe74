// L2Normalization: y = x * rstd over the last dimension, rstd = 1 / sqrt(sum(x^2) + eps).
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/norm.h"

namespace transformer_ops::ops::l2_normalization {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, double) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  return {like(input), row_statistics(input)};
}

void forward_cpu(const Tensor& input, double eps, Tensor& output, Tensor& rstd) {
  const cpu::Rows x{input, input.size(-1)}, y{output, x.width}, rstds{rstd, 1};
  // Rows without elements have an rstd, too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::l2_norm_forward(cpu::kernel_dtype(input), x.read(begin), eps, y.write(begin),
                         rstds.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Tensor& input, double eps, Tensor& output, Tensor& rstd) {
  cuda::norm_forward(cuda::stream_of(input), {.norm = cuda::Norm::L2,
                                              .dtype = kernel_dtype(input),
                                              .x = cuda::read(input),
                                              .eps = eps,
                                              .y = cuda::write(output),
                                              .rstd = cuda::write(rstd),
                                              .rows = rstd.numel(),
                                              .h = input.size(-1)});
}

Tensor forward_decomposed(const Tensor& input, double eps) {
  const Tensor x = to_accumulate(input);
  const Tensor rstd = at::rsqrt(at::sum(x.square(), -1, /*keepdim=*/true) + eps);
  return (x * rstd).to(input.scalar_type());
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& rstd, double) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check.spec("grad_output", grad_output, like(input));
  check.spec("rstd", rstd, row_statistics(input));
  return {like(input)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& rstd, double,
                  Tensor& grad_input) {
  const cpu::Rows x{input, input.size(-1)}, grad{grad_output, x.width};
  const cpu::Rows rstds{rstd, 1}, grad_x{grad_input, x.width};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::l2_norm_backward(cpu::kernel_dtype(input), grad.read(begin), x.read(begin),
                          rstds.read(begin), grad_x.write(begin), end - begin, x.width);
  });
}

void backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& rstd, double,
                   Tensor& grad_input) {
  cuda::run_norm_backward(input, {.norm = cuda::Norm::L2,
                                  .dtype = kernel_dtype(input),
                                  .grad_y = cuda::read(grad_output),
                                  .x = cuda::read(input),
                                  .rstd = cuda::read(rstd),
                                  .residual_dtype = kernel_dtype(input),
                                  .grad_x = cuda::write(grad_input),
                                  .rows = rstd.numel(),
                                  .h = input.size(-1)});
}

NormTensors recompute_tensors(const Tensor&, const Tensor& input, const Tensor& rstd) {
  return {input, nullptr, rstd, nullptr, nullptr};
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "L2Normalization",
                    .summary = "x / sqrt(sum(x^2) + eps) over the last dimension",
                    .attributes = {"eps"},
                    .slots = {{"input"}, {"rstd"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "l2_normalization(Tensor input, float eps) -> "
                          "(Tensor output, Tensor rstd)",
                .shape = forward_shape,
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .by_rows = {"input"}},
    // Only the decomposition needs eps.
    .backward = {.schema = "l2_normalization_backward(Tensor grad_output, Tensor input, "
                           "Tensor rstd, float eps) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {"grad_output", "input"},
                 .bodies = {.cpu = backward_cpu, .cuda = backward_cuda},
                 .by_rows = {"grad_output", "input", "rstd"}},
    .recompute = recompute_norm("recompute_l2_normalization(Tensor grad_output, Tensor input, "
                                "Tensor rstd) -> Tensor output",
                                recompute_tensors, {"input", "rstd"}),
});

}  // namespace
}  // namespace transformer_ops::ops::l2_normalization
