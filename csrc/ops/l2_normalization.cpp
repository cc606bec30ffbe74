// L2Normalization: y = x * rstd over the last dimension, rstd = 1 / sqrt(sum(x^2) + eps).
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include "bodies/cpu.h"
#include "bodies/norm_cuda.h"
#include "bodies/recompute_norm.h"
#include "kernels/norm.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) {
  const Tensor& input = args.tensor(0);
  check_compute_dtype(args, "input", input);
  check_has_rows(args, "input", input);
  return {like(input), row_statistics(input)};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(0).size(-1)};
  const cpu::Rows y{results[0], x.width}, rstd{results[1], 1};
  // Rows without elements have a rstd too.
  cpu::parallel(rstd.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::l2_norm_forward(cpu::kernel_dtype(x.tensor), x.read(begin), args.number(1), y.write(begin),
                         rstd.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(0);
  cuda::norm_forward(cuda::stream_of(x), {.norm = cuda::Norm::L2,
                                          .dtype = kernel_dtype(x),
                                          .x = cuda::read(x),
                                          .eps = args.number(1),
                                          .y = cuda::write(results[0]),
                                          .rstd = cuda::write(results[1]),
                                          .rows = results[1].numel(),
                                          .h = x.size(-1)});
}

Tensors forward_unfused(const Args& args) {
  const Tensor x = to_accumulate(args.tensor(0));
  const Tensor rstd = at::rsqrt(at::sum(x.square(), -1, /*keepdim=*/true) + args.number(1));
  return {(x * rstd).to(args.tensor(0).scalar_type())};
}

TensorSpecs backward_shape(const Args& args) {
  const Tensor& input = args.tensor(1);
  check_compute_dtype(args, "input", input);
  check_has_rows(args, "input", input);
  check_spec(args, "grad_output", args.tensor(0), like(input));
  check_spec(args, "rstd", args.tensor(2), row_statistics(input));
  return {like(input)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(1), args.tensor(1).size(-1)};
  const cpu::Rows grad{args.tensor(0), x.width}, rstd{args.tensor(2), 1};
  const cpu::Rows grad_x{results[0], x.width};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::l2_norm_backward(cpu::kernel_dtype(x.tensor), grad.read(begin), x.read(begin),
                          rstd.read(begin), grad_x.write(begin), end - begin, x.width);
  });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(1), &rstd = args.tensor(2);
  cuda::run_norm_backward(x, {.norm = cuda::Norm::L2,
                              .dtype = kernel_dtype(x),
                              .grad_y = cuda::read(args.tensor(0)),
                              .x = cuda::read(x),
                              .rstd = cuda::read(rstd),
                              .residual_dtype = kernel_dtype(x),
                              .grad_x = cuda::write(results[0]),
                              .rows = rstd.numel(),
                              .h = x.size(-1)});
}

NormTensors recompute_tensors(const Args& args) {
  return {args.tensor(1), nullptr, args.tensor(2), nullptr, nullptr};
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
                .overwrites = {0},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused},
    // eps serves only the unfused meaning.
    .backward = {.schema = "l2_normalization_backward(Tensor grad_output, Tensor input, "
                           "Tensor rstd, float eps) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {0, 1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda},
    .recompute = recompute_norm("recompute_l2_normalization(Tensor grad_output, Tensor input, "
                                "Tensor rstd) -> Tensor output",
                                recompute_tensors),
});

}  // namespace
}  // namespace transformer_ops
