// LayerNorm: y = (x - mean) * rstd * gamma + beta over the trailing dimensions.
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/norm.h"

namespace transformer_ops::ops::layer_norm {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor* weight,
                          const Tensor* bias, const NormShape& shape, double,
                          bool zero_centered_gamma) {
  check_norm(check, input, weight, bias, shape, zero_centered_gamma);
  const TensorSpec statistics = row_statistics(input, std::ssize(shape));
  return {like(input), statistics, statistics};
}

void forward_cpu(const Tensor& input, const Tensor* weight, const Tensor* bias,
                 const NormShape& shape, double eps, bool zero_centered_gamma, Tensor& output,
                 Tensor& mean, Tensor& rstd) {
  const cpu::Rows x{input, norm_width(shape)}, y{output, x.width}, means{mean, 1}, rstds{rstd, 1};
  const cpu::NormParameters parameters(input, weight, bias, zero_centered_gamma);
  // Rows without elements have statistics, too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::layer_norm_forward(cpu::kernel_dtype(input), x.read(begin), parameters.gamma,
                            parameters.beta, eps, y.write(begin), means.write(begin),
                            rstds.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Tensor& input, const Tensor* weight, const Tensor* bias,
                  const NormShape& shape, double eps, bool zero_centered_gamma, Tensor& output,
                  Tensor& mean, Tensor& rstd) {
  auto norm = cuda::norm_of(cuda::Norm::LayerNorm, input, weight, bias, shape, eps,
                            zero_centered_gamma, output, rstd);
  norm.mean = cuda::write(mean);
  cuda::norm_forward(cuda::stream_of(input), norm);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& mean, const Tensor& rstd, const Tensor* weight,
                           const NormShape& shape, double, bool, LayerNormMask wanted) {
  check_norm_backward(check, grad_output, input, &mean, rstd, weight, shape, wanted[1]);
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  return {wants_input ? like(input) : absent(input.scalar_type()),
          norm_gradient(input, weight, shape, wants_weight),
          norm_gradient(input, weight, shape, wants_bias)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                  const Tensor& rstd, const Tensor* weight, const NormShape& shape, double,
                  bool zero_centered_gamma, LayerNormMask wanted, Tensor& grad_input,
                  Tensor& grad_weight, Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  const cpu::Rows x{input, norm_width(shape)}, grad{grad_output, x.width};
  const cpu::Rows means{mean, 1}, rstds{rstd, 1}, grad_x{of_input, x.width};
  const cpu::NormParameters parameters(input, weight, nullptr, zero_centered_gamma);
  Tensors sums_of;
  if (wants_weight) sums_of.push_back(grad_weight);
  if (wants_bias) sums_of.push_back(grad_bias);
  cpu::sum_rows(x.count(), x.width, input, sums_of,
                [&, wants_weight = wants_weight, wants_bias = wants_bias](
                    int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::layer_norm_backward(
                      cpu::kernel_dtype(input), grad.read(begin), x.read(begin), means.read(begin),
                      rstds.read(begin), parameters.gamma, grad_x.write(begin),
                      wants_weight ? sums.front() : nullptr, wants_bias ? sums.back() : nullptr,
                      end - begin, x.width);
                });
}

void backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                   const Tensor& rstd, const Tensor* weight, const NormShape& shape, double,
                   bool zero_centered_gamma, LayerNormMask wanted, Tensor& grad_input,
                   Tensor& grad_weight, Tensor& grad_bias) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  auto norm = cuda::norm_backward_of(cuda::Norm::LayerNorm, grad_output, input, rstd, weight, shape,
                                     zero_centered_gamma, of_input);
  norm.mean = cuda::read(mean);
  norm.grad_gamma = cuda::gradient_if(wants_weight, grad_weight);
  norm.grad_beta = cuda::gradient_if(wants_bias, grad_bias);
  cuda::run_norm_backward(input, norm);
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Tensor& grad_output,
                                                       const Tensor& input, const Tensor&,
                                                       const Tensor&, const Tensor* weight,
                                                       const NormShape& shape, double eps,
                                                       bool zero_centered_gamma,
                                                       LayerNormMask wanted) {
  return layer_norm_gradients(grad_output, input, weight, shape, eps, zero_centered_gamma, wanted);
}

NormTensors recompute_tensors(const Tensor&, const Tensor& input, const Tensor& mean,
                              const Tensor& rstd, const Tensor* weight, const Tensor* bias,
                              bool zero_centered_gamma) {
  return {input, &mean, rstd, weight, bias, zero_centered_gamma};
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "LayerNorm",
                    .summary = "(x - mean) * rstd * gamma + beta over the trailing dimensions",
                    .parameters = {"weight", "bias"},
                    .attributes = {"normalized_shape", "eps", "zero_centered_gamma"},
                    .slots = {{"input"}, {"mean"}, {"rstd"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "layer_norm(Tensor input, Tensor? weight, Tensor? bias, "
                          "int[] normalized_shape, float eps, bool zero_centered_gamma) -> (Tensor "
                          "output, Tensor mean, Tensor rstd)",
                .shape = forward_shape,
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, layer_norm_decomposed},
                .by_rows = {"input"}},
    .backward = {.schema = "layer_norm_backward(Tensor grad_output, Tensor input, Tensor mean, "
                           "Tensor rstd, Tensor? weight, int[] normalized_shape, float eps, "
                           "bool zero_centered_gamma, bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = backward_shape,
                 .overwrites = {"grad_output", "input"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
    .recompute = recompute_norm(
        "recompute_layer_norm(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, "
        "Tensor? weight, Tensor? bias, bool zero_centered_gamma) -> Tensor output",
        recompute_tensors, {"input", "mean", "rstd"}),
});

}  // namespace
}  // namespace transformer_ops::ops::layer_norm
