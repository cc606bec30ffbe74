// backward:       g ─► LayerNorm' or RMSNorm' ─► (+) ─► g      one pass over the rows
//      g of the extra output ─────────────────────┘
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/make_extra_output.h"
#include "wrappers/norm.h"

namespace transformer_ops::fused::norm_residual {
namespace {

// The spec of the input's gradient, which is a sum.
TensorSpec sum_spec(const Checks& check, const Tensor& input, const Tensor& grad_extra_output,
                    bool wanted) {
  const TensorSpec sum = with_extra_gradient(check, like(input), grad_extra_output);
  return wanted ? sum : absent(sum.dtype);
}

// The arguments of both norms' kernels: grad_output, input and statistics in one dtype, and the
// extra output's gradient.
struct Rows {
  Rows(const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input,
       const Tensor& rstd, const Tensor& grad_input)
      : extra(grad_extra_output, input, grad_input),
        grad(grad_output.to(extra.dtype)),
        x(input.to(extra.dtype)),
        rstd(statistics(rstd)) {}

  Tensor statistics(const Tensor& tensor) const { return tensor.to(accumulate_dtype(extra.dtype)); }

  cuda::NormBackward cuda(cuda::Norm norm, const Tensor* weight, const NormShape& shape,
                          bool zero_centered_gamma, const Tensor& grad_input) const {
    auto kernel =
        cuda::norm_backward_of(norm, grad, x, rstd, weight, shape, zero_centered_gamma, grad_input);
    kernel.residual = cuda::read(extra.gradient);
    kernel.residual_dtype = kernel_dtype(extra.gradient);
    return kernel;
  }

  ExtraGradient extra;
  Tensor grad, x, rstd;
};

// ---- LayerNorm

TensorSpecs layer_norm_shape(const Checks& check, const Tensor& grad_output,
                             const Tensor& grad_extra_output, const Tensor& input,
                             const Tensor& mean, const Tensor& rstd, const Tensor* weight,
                             const NormShape& shape, double, bool, LayerNormMask wanted) {
  check_norm_backward(check, grad_output, input, &mean, rstd, weight, shape, wanted[1]);
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  return {sum_spec(check, input, grad_extra_output, wants_input),
          norm_gradient(input, weight, shape, wants_weight),
          norm_gradient(input, weight, shape, wants_bias)};
}

void layer_norm_cpu(const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input,
                    const Tensor& mean, const Tensor& rstd, const Tensor* weight,
                    const NormShape& shape, double, bool zero_centered_gamma, LayerNormMask wanted,
                    Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const int64_t width = norm_width(shape);
  const Tensor sum = memory_for(grad_input, wants_input, input);
  const Rows rows(grad_output, grad_extra_output, input, rstd, sum);
  const cpu::NormParameters parameters(rows.x, weight, nullptr, zero_centered_gamma);
  const Tensor statistics = rows.statistics(mean);
  const cpu::Rows grad{rows.grad, width}, x{rows.x, width}, means{statistics, 1};
  const cpu::Rows rstds{rows.rstd, 1}, residual{rows.extra.gradient, width};
  const cpu::Rows grad_x{sum, width};
  Tensors sums_of;
  if (wants_weight) sums_of.push_back(grad_weight);
  if (wants_bias) sums_of.push_back(grad_bias);
  cpu::sum_rows(x.count(), width, rows.x, sums_of,
                [&, wants_weight = wants_weight, wants_bias = wants_bias](
                    int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::layer_norm_residual_backward(
                      cpu::kernel_dtype(rows.x), rows.extra.wide, grad.read(begin), x.read(begin),
                      means.read(begin), rstds.read(begin), parameters.gamma, residual.read(begin),
                      grad_x.write(begin), wants_weight ? sums.front() : nullptr,
                      wants_bias ? sums.back() : nullptr, end - begin, width);
                });
}

void layer_norm_cuda(const Tensor& grad_output, const Tensor& grad_extra_output,
                     const Tensor& input, const Tensor& mean, const Tensor& rstd,
                     const Tensor* weight, const NormShape& shape, double, bool zero_centered_gamma,
                     LayerNormMask wanted, Tensor& grad_input, Tensor& grad_weight,
                     Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor sum = memory_for(grad_input, wants_input, input);
  const Rows rows(grad_output, grad_extra_output, input, rstd, sum);
  const Tensor means = rows.statistics(mean);
  auto norm = rows.cuda(cuda::Norm::LayerNorm, weight, shape, zero_centered_gamma, sum);
  norm.mean = cuda::read(means);
  norm.grad_gamma = cuda::gradient_if(wants_weight, grad_weight);
  norm.grad_beta = cuda::gradient_if(wants_bias, grad_bias);
  cuda::run_norm_backward(rows.x, norm);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_residual_decomposed(
    const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input, const Tensor&,
    const Tensor&, const Tensor* weight, const NormShape& shape, double eps,
    bool zero_centered_gamma, LayerNormMask wanted) {
  const auto [grad_input, grad_weight, grad_bias] =
      layer_norm_gradients(grad_output, input, weight, shape, eps, zero_centered_gamma, wanted);
  return {wanted[0] ? grad_input + grad_extra_output : Tensor(), grad_weight, grad_bias};
}

// ---- RMSNorm

TensorSpecs rms_norm_shape(const Checks& check, const Tensor& grad_output,
                           const Tensor& grad_extra_output, const Tensor& input, const Tensor& rstd,
                           const Tensor* weight, const NormShape& shape, std::optional<double>,
                           bool, RMSNormMask wanted) {
  check_norm_backward(check, grad_output, input, nullptr, rstd, weight, shape, wanted[1]);
  const auto [wants_input, wants_weight] = wanted;
  return {sum_spec(check, input, grad_extra_output, wants_input),
          norm_gradient(input, weight, shape, wants_weight)};
}

void rms_norm_cpu(const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input,
                  const Tensor& rstd, const Tensor* weight, const NormShape& shape,
                  std::optional<double>, bool zero_centered_gamma, RMSNormMask wanted,
                  Tensor& grad_input, Tensor& grad_weight) {
  const auto [wants_input, wants_weight] = wanted;
  const int64_t width = norm_width(shape);
  const Tensor sum = memory_for(grad_input, wants_input, input);
  const Rows rows(grad_output, grad_extra_output, input, rstd, sum);
  const cpu::NormParameters parameters(rows.x, weight, nullptr, zero_centered_gamma);
  const cpu::Rows grad{rows.grad, width}, x{rows.x, width}, rstds{rows.rstd, 1};
  const cpu::Rows residual{rows.extra.gradient, width}, grad_x{sum, width};
  cpu::sum_rows(
      x.count(), width, rows.x, {&grad_weight, wants_weight ? size_t{1} : 0},
      [&, wants_weight = wants_weight](int64_t begin, int64_t end, const std::vector<void*>& sums) {
        cpu::rms_norm_residual_backward(cpu::kernel_dtype(rows.x), rows.extra.wide,
                                        grad.read(begin), x.read(begin), rstds.read(begin),
                                        parameters.gamma, residual.read(begin), grad_x.write(begin),
                                        wants_weight ? sums[0] : nullptr, end - begin, width);
      });
}

void rms_norm_cuda(const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input,
                   const Tensor& rstd, const Tensor* weight, const NormShape& shape,
                   std::optional<double>, bool zero_centered_gamma, RMSNormMask wanted,
                   Tensor& grad_input, Tensor& grad_weight) {
  const auto [wants_input, wants_weight] = wanted;
  const Tensor sum = memory_for(grad_input, wants_input, input);
  const Rows rows(grad_output, grad_extra_output, input, rstd, sum);
  auto norm = rows.cuda(cuda::Norm::RMSNorm, weight, shape, zero_centered_gamma, sum);
  norm.grad_gamma = cuda::gradient_if(wants_weight, grad_weight);
  cuda::run_norm_backward(rows.x, norm);
}

std::tuple<Tensor, Tensor> rms_norm_residual_decomposed(
    const Tensor& grad_output, const Tensor& grad_extra_output, const Tensor& input, const Tensor&,
    const Tensor* weight, const NormShape& shape, std::optional<double> eps,
    bool zero_centered_gamma, RMSNormMask wanted) {
  const auto [grad_input, grad_weight] =
      rms_norm_gradients(grad_output, input, weight, shape, eps, zero_centered_gamma, wanted);
  return {wanted[0] ? grad_input + grad_extra_output : Tensor(), grad_weight};
}

// ---- rules

bool register_norm(const std::string& name, const std::string& kind, TypedOp backward) {
  return register_fused_op({.rule = {.name = name,
                                     .pass = Pass::Backward,
                                     .benefit = 20,
                                     .pattern = {{"MakeExtraOutput"}, {kind}},
                                     .why_not = no_extra_gradient},
                            .backward = std::move(backward)});
}

[[maybe_unused]] const bool registered =
    register_norm("layer_norm_residual", "LayerNorm",
                  {.schema = "layer_norm_residual_backward(Tensor grad_output, "
                             "Tensor grad_extra_output, Tensor input, Tensor mean, Tensor rstd, "
                             "Tensor? weight, int[] normalized_shape, float eps, "
                             "bool zero_centered_gamma, bool[3] output_mask) -> "
                             "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                   .shape = layer_norm_shape,
                   .overwrites = {"grad_output", "grad_extra_output", "input"},
                   .bodies = {layer_norm_cpu, layer_norm_cuda, layer_norm_residual_decomposed}}) &&
    register_norm("rms_norm_residual", "RMSNorm",
                  {.schema = "rms_norm_residual_backward(Tensor grad_output, "
                             "Tensor grad_extra_output, Tensor input, Tensor rstd, Tensor? weight, "
                             "int[] normalized_shape, float? eps, bool zero_centered_gamma, "
                             "bool[2] output_mask) -> "
                             "(Tensor grad_input, Tensor grad_weight)",
                   .shape = rms_norm_shape,
                   .overwrites = {"grad_output", "grad_extra_output", "input"},
                   .bodies = {rms_norm_cpu, rms_norm_cuda, rms_norm_residual_decomposed}});

}  // namespace
}  // namespace transformer_ops::fused::norm_residual
