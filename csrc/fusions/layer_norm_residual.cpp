// backward:       g ─► LayerNorm' ─► (+) ─► g      one pass over the rows
//      g of the extra output ─────────┘
#include <ATen/ops/zeros_like.h>

#include "bodies/cpu.h"
#include "bodies/make_extra_output.h"
#include "bodies/norm_cuda.h"
#include "kernels/norm.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& input = args.tensor(2);
  const Tensor& weight = args.tensor(5);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "weight", weight);
  check_trailing(args, "input", input, weight);
  check_spec(args, "grad_output", args.tensor(0), like(input));
  check_spec(args, "mean", args.tensor(3), row_statistics(input, weight.dim()));
  check_spec(args, "rstd", args.tensor(4), row_statistics(input, weight.dim()));
  const TensorSpec grad = with_extra_gradient(args, like(input), args.tensor(1), args.flag(8, 0));
  const TensorSpec absent{{0}, weight.scalar_type()};
  return {grad, args.flag(8, 1) ? like(weight) : absent, args.flag(8, 2) ? like(weight) : absent};
}

void backward_cpu(const Args& args, Tensors& results) {
  const int64_t width = args.tensor(5).numel();
  const ExtraGradient extra(args.tensor(1), args.tensor(2), results[0]);
  const Tensor grad_y = args.tensor(0).to(extra.dtype), input = args.tensor(2).to(extra.dtype);
  const auto statistics = accumulate_dtype(extra.dtype);
  const Tensor means = args.tensor(3).to(statistics), rstds = args.tensor(4).to(statistics);
  const Tensor gamma = cpu::to_accumulate(args.tensor(5), input, args.flag(7) ? 1.0 : 0.0);
  const cpu::Rows grad{grad_y, width}, x{input, width}, mean{means, 1}, rstd{rstds, 1};
  const cpu::Rows residual{extra.gradient, width}, grad_x{results[0], width};
  Tensors wanted;
  for (size_t k : {1, 2}) {
    if (args.flag(8, k)) wanted.push_back(results[k]);
  }
  cpu::sum_rows(x.count(), width, input, wanted,
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::layer_norm_residual_backward(
                      cpu::kernel_dtype(input), extra.wide, grad.read(begin), x.read(begin),
                      mean.read(begin), rstd.read(begin), gamma.const_data_ptr(),
                      residual.read(begin), grad_x.write(begin),
                      args.flag(8, 1) ? sums.front() : nullptr,
                      args.flag(8, 2) ? sums.back() : nullptr, end - begin, width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& weight = args.tensor(5);
  const ExtraGradient extra(args.tensor(1), args.tensor(2), results[0]);
  const Tensor grad = args.tensor(0).to(extra.dtype), x = args.tensor(2).to(extra.dtype);
  const auto statistics = accumulate_dtype(extra.dtype);
  const Tensor mean = args.tensor(3).to(statistics), rstd = args.tensor(4).to(statistics);
  const auto wanted = [&](size_t k) {
    return args.flag(8, k) ? cuda::gradient(results[k]) : cuda::Gradient();
  };
  cuda::run_norm_backward(x, {.norm = cuda::Norm::LayerNorm,
                              .dtype = kernel_dtype(x),
                              .grad_y = cuda::read(grad),
                              .x = cuda::read(x),
                              .mean = cuda::read(mean),
                              .rstd = cuda::read(rstd),
                              .gamma = cuda::vector(weight, args.flag(7) ? 1.0 : 0.0),
                              .residual = cuda::read(extra.gradient),
                              .residual_dtype = kernel_dtype(extra.gradient),
                              .grad_x = cuda::write(results[0]),
                              .grad_gamma = wanted(1),
                              .grad_beta = wanted(2),
                              .rows = rstd.numel(),
                              .h = weight.numel()});
}

Tensors backward_unfused(const Args& args) {
  const Tensor& weight = args.tensor(5);
  const Tensors grads =
      differentiate(find_typed_op("layer_norm")->unfused, args.op(),
                    {args[2], weight, at::zeros_like(weight), args[6], args[7]}, args.tensor(0));
  const auto wanted = [&](size_t k) { return args.flag(8, k) ? grads[k] : Tensor(); };
  return {grads[0] + args.tensor(1), wanted(1), wanted(2)};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "layer_norm_residual",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"MakeExtraOutput"}, {"LayerNorm"}},
             .why_not = no_extra_gradient},
    .backward = {.schema = "layer_norm_residual_backward(Tensor grad_output, "
                           "Tensor grad_extra_output, Tensor input, Tensor mean, Tensor rstd, "
                           "Tensor weight, float eps, bool zero_centered_gamma, "
                           "bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {0, 1, 2},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
