// LayerNorm: y = (x - mean) * rstd * gamma + beta over the trailing dimensions.
#include "bodies/cpu.h"
#include "bodies/norm.h"
#include "op/op.h"

namespace transformer_ops::ops::layer_norm {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor& bias, double, bool) {
  check_layer_norm(check, input, weight, bias);
  return {like(input), row_statistics(input, weight.dim()), row_statistics(input, weight.dim())};
}

void forward_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps,
                 bool zero_centered_gamma, Tensor& output, Tensor& mean, Tensor& rstd) {
  const cpu::Rows x{input, weight.numel()}, y{output, x.width}, means{mean, 1}, rstds{rstd, 1};
  const Tensor gamma = cpu::to_accumulate(weight, input, gamma_offset(zero_centered_gamma));
  const Tensor beta = cpu::to_accumulate(bias, input);
  // Rows without elements have statistics too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::layer_norm_forward(cpu::kernel_dtype(input), x.read(begin), gamma.const_data_ptr(),
                            beta.const_data_ptr(), eps, y.write(begin), means.write(begin),
                            rstds.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps,
                  bool zero_centered_gamma, Tensor& output, Tensor& mean, Tensor& rstd) {
  auto norm =
      cuda::norm_of(cuda::Norm::LayerNorm, input, weight, eps, zero_centered_gamma, output, rstd);
  norm.beta = cuda::vector(bias);
  norm.mean = cuda::write(mean);
  cuda::norm_forward(cuda::stream_of(input), norm);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& mean, const Tensor& rstd, const Tensor& weight, double,
                           bool) {
  check_layer_norm_backward(check, grad_output, input, mean, rstd, weight);
  return {like(input), like(weight), like(weight)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                  const Tensor& rstd, const Tensor& weight, double, bool zero_centered_gamma,
                  Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const cpu::Rows x{input, weight.numel()}, grad{grad_output, x.width};
  const cpu::Rows means{mean, 1}, rstds{rstd, 1}, grad_x{grad_input, x.width};
  const Tensor gamma = cpu::to_accumulate(weight, input, gamma_offset(zero_centered_gamma));
  Tensor sums_of[] = {grad_weight, grad_bias};
  cpu::sum_rows(x.count(), x.width, input, sums_of,
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::layer_norm_backward(cpu::kernel_dtype(input), grad.read(begin),
                                           x.read(begin), means.read(begin), rstds.read(begin),
                                           gamma.const_data_ptr(), grad_x.write(begin), sums[0],
                                           sums[1], end - begin, x.width);
                });
}

void backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                   const Tensor& rstd, const Tensor& weight, double, bool zero_centered_gamma,
                   Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  auto norm = cuda::norm_backward_of(cuda::Norm::LayerNorm, grad_output, input, rstd, weight,
                                     zero_centered_gamma, grad_input);
  norm.mean = cuda::read(mean);
  norm.grad_gamma = cuda::gradient(grad_weight);
  norm.grad_beta = cuda::gradient(grad_bias);
  cuda::run_norm_backward(input, norm);
}

std::tuple<Tensor, Tensor, Tensor> backward_unfused(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor&, const Tensor&,
                                                    const Tensor& weight, double eps,
                                                    bool zero_centered_gamma) {
  return layer_norm_gradients(grad_output, input, weight, eps, zero_centered_gamma);
}

NormTensors recompute_tensors(const Tensor&, const Tensor& input, const Tensor& mean,
                              const Tensor& rstd, const Tensor& weight, const Tensor& bias,
                              bool zero_centered_gamma) {
  return {input, &mean, rstd, &weight, &bias, zero_centered_gamma};
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
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, layer_norm_unfused},
                .by_rows = {"input"}},
    .backward = {.schema = "layer_norm_backward(Tensor grad_output, Tensor input, Tensor mean, "
                           "Tensor rstd, Tensor weight, float eps, bool zero_centered_gamma) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = backward_shape,
                 .overwrites = {"grad_output", "input"},
                 .bodies = {backward_cpu, backward_cuda, backward_unfused}},
    .recompute = recompute_norm(
        "recompute_layer_norm(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, "
        "Tensor weight, Tensor bias, bool zero_centered_gamma) -> Tensor output",
        recompute_tensors, {"input", "mean", "rstd"}),
});

}  // namespace
}  // namespace transformer_ops::ops::layer_norm
