// backward:       g ─► RMSNorm' ─► (+) ─► g      one pass over the rows
//      g of the extra output ───────┘
#include "bodies/cpu.h"
#include "bodies/make_extra_output.h"
#include "bodies/norm_cuda.h"
#include "kernels/norm.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& input = args.tensor(2);
  const Tensor& weight = args.tensor(4);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "weight", weight);
  check_trailing(args, "input", input, weight);
  check_spec(args, "grad_output", args.tensor(0), like(input));
  check_spec(args, "rstd", args.tensor(3), row_statistics(input, weight.dim()));
  const TensorSpec grad = with_extra_gradient(args, like(input), args.tensor(1), args.flag(7, 0));
  return {grad, args.flag(7, 1) ? like(weight) : TensorSpec{{0}, weight.scalar_type()}};
}

void backward_cpu(const Args& args, Tensors& results) {
  const int64_t width = args.tensor(4).numel();
  const ExtraGradient extra(args.tensor(1), args.tensor(2), results[0]);
  const Tensor grad_y = args.tensor(0).to(extra.dtype), input = args.tensor(2).to(extra.dtype);
  const Tensor rstds = args.tensor(3).to(accumulate_dtype(extra.dtype));
  const Tensor gamma = cpu::to_accumulate(args.tensor(4), input, args.flag(6) ? 1.0 : 0.0);
  const cpu::Rows grad{grad_y, width}, x{input, width}, rstd{rstds, 1};
  const cpu::Rows residual{extra.gradient, width}, grad_x{results[0], width};
  const bool wanted = args.flag(7, 1);
  cpu::sum_rows(x.count(), width, input, std::span(results).subspan(1, wanted ? 1 : 0),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::rms_norm_residual_backward(
                      cpu::kernel_dtype(input), extra.wide, grad.read(begin), x.read(begin),
                      rstd.read(begin), gamma.const_data_ptr(), residual.read(begin),
                      grad_x.write(begin), wanted ? sums[0] : nullptr, end - begin, width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& weight = args.tensor(4);
  const ExtraGradient extra(args.tensor(1), args.tensor(2), results[0]);
  const Tensor grad = args.tensor(0).to(extra.dtype), x = args.tensor(2).to(extra.dtype);
  const Tensor rstd = args.tensor(3).to(accumulate_dtype(extra.dtype));
  cuda::run_norm_backward(
      x, {.norm = cuda::Norm::RMSNorm,
          .dtype = kernel_dtype(x),
          .grad_y = cuda::read(grad),
          .x = cuda::read(x),
          .rstd = cuda::read(rstd),
          .gamma = cuda::vector(weight, args.flag(6) ? 1.0 : 0.0),
          .residual = cuda::read(extra.gradient),
          .residual_dtype = kernel_dtype(extra.gradient),
          .grad_x = cuda::write(results[0]),
          .grad_gamma = args.flag(7, 1) ? cuda::gradient(results[1]) : cuda::Gradient(),
          .rows = rstd.numel(),
          .h = weight.numel()});
}

Tensors backward_unfused(const Args& args) {
  const Tensors grads = differentiate(find_typed_op("rms_norm")->unfused, args.op(),
                                      {args[2], args[4], args[5], args[6]}, args.tensor(0));
  return {grads[0] + args.tensor(1), args.flag(7, 1) ? grads[1] : Tensor()};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "rms_norm_residual",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"MakeExtraOutput"}, {"RMSNorm"}},
             .why_not = no_extra_gradient},
    .backward = {.schema = "rms_norm_residual_backward(Tensor grad_output, "
                           "Tensor grad_extra_output, Tensor input, Tensor rstd, Tensor weight, "
                           "float eps, bool zero_centered_gamma, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = shape,
                 .overwrites = {0, 1, 2},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
