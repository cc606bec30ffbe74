#include "bodies/norm.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <numeric>

#include "bodies/cpu.h"

namespace transformer_ops {
namespace {

int64_t dims_of(const NormTensors& norm) { return norm.weight ? norm.weight->dim() : 1; }

}  // namespace

// ---- checks

void check_norm(const Checks& check, const Tensor& input, const Tensor& weight) {
  check.compute_dtype("input", input);
  check.compute_dtype("weight", weight);
  check.trailing("input", input, weight);
}

void check_layer_norm(const Checks& check, const Tensor& input, const Tensor& weight,
                      const Tensor& bias) {
  check_norm(check, input, weight);
  check.compute_dtype("bias", bias);
  check.same_sizes("bias", bias, weight);
}

void check_rms_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                             const Tensor& rstd, const Tensor& weight) {
  check_norm(check, input, weight);
  check.spec("grad_output", grad_output, like(input));
  check.spec("rstd", rstd, row_statistics(input, weight.dim()));
}

void check_layer_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                               const Tensor& mean, const Tensor& rstd, const Tensor& weight) {
  check_rms_norm_backward(check, grad_output, input, rstd, weight);
  check.spec("mean", mean, row_statistics(input, weight.dim()));
}

// ---- meanings

Tensor layer_norm_unfused(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps,
                          bool zero_centered_gamma) {
  const Tensor x = to_accumulate(input);
  const Tensor gamma = weight.to(x.scalar_type());
  const Tensor y = at::layer_norm_symint(
      x, gamma.sym_sizes(), zero_centered_gamma ? gamma + 1 : gamma, bias.to(x.scalar_type()), eps);
  return y.to(input.scalar_type());
}

double rms_norm_eps(std::optional<double> eps, const Tensor& input) {
  if (eps) return *eps;
  return accumulate_dtype(input.scalar_type()) == at::kDouble
             ? std::numeric_limits<double>::epsilon()
             : std::numeric_limits<float>::epsilon();
}

Tensor rms_norm_unfused(const Tensor& input, const Tensor& weight, std::optional<double> eps,
                        bool zero_centered_gamma) {
  const Tensor x = to_accumulate(input);
  const Tensor gamma = weight.to(x.scalar_type());
  std::vector<int64_t> dims(gamma.dim());
  std::iota(dims.begin(), dims.end(), -gamma.dim());
  const Tensor squares = at::mean(x.square(), dims, /*keepdim=*/true);
  const Tensor y =
      x * at::rsqrt(squares + rms_norm_eps(eps, input)) * (zero_centered_gamma ? gamma + 1 : gamma);
  return y.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(const Tensor& grad_output,
                                                        const Tensor& input, const Tensor& weight,
                                                        double eps, bool zero_centered_gamma) {
  const auto norm = [&](const Tensor& x, const Tensor& gamma, const Tensor& beta) {
    return layer_norm_unfused(x, gamma, beta, eps, zero_centered_gamma);
  };
  const auto [grad_input, grad_weight, grad_bias] =
      gradients(norm, grad_output, input, weight, at::zeros_like(weight));
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor> rms_norm_gradients(const Tensor& grad_output, const Tensor& input,
                                              const Tensor& weight, std::optional<double> eps,
                                              bool zero_centered_gamma) {
  const double epsilon = rms_norm_eps(eps, input);
  const auto norm = [&](const Tensor& x, const Tensor& gamma) {
    return rms_norm_unfused(x, gamma, epsilon, zero_centered_gamma);
  };
  const auto [grad_input, grad_weight] = gradients(norm, grad_output, input, weight);
  return {grad_input, grad_weight};
}

// ---- kernels

namespace cuda {

NormForward norm_of(Norm norm, const Tensor& input, const Tensor& weight, double eps,
                    bool zero_centered_gamma, const Tensor& output, const Tensor& rstd) {
  return {.norm = norm,
          .dtype = kernel_dtype(input),
          .x = read(input),
          .gamma = vector(weight, gamma_offset(zero_centered_gamma)),
          .eps = eps,
          .y = write(output),
          .rstd = write(rstd),
          .rows = rstd.numel(),
          .h = weight.numel()};
}

NormBackward norm_backward_of(Norm norm, const Tensor& grad_output, const Tensor& input,
                              const Tensor& rstd, const Tensor& weight, bool zero_centered_gamma,
                              const Tensor& grad_input) {
  return {.norm = norm,
          .dtype = kernel_dtype(input),
          .grad_y = read(grad_output),
          .x = read(input),
          .rstd = read(rstd),
          .gamma = vector(weight, gamma_offset(zero_centered_gamma)),
          .residual_dtype = kernel_dtype(input),
          .grad_x = write(grad_input),
          .rows = rstd.numel(),
          .h = weight.numel()};
}

void run_norm_backward(const Tensor& x, NormBackward norm) {
  Tensor partials;
  const int wanted = (norm.grad_gamma.data != nullptr) + (norm.grad_beta.data != nullptr);
  if (wanted > 0) {
    norm.parts = norm_backward_parts(norm.rows, norm.h);
    partials = empty({norm.parts, wanted, norm.h}, accumulate_dtype(x.scalar_type()), x.device());
    norm.partials = write(partials);
  }
  norm_backward(stream_of(x), norm);
}

}  // namespace cuda

// ---- recomputing

TensorSpecs normalize_shape(const Checks& check, const NormTensors& norm) {
  check.compute_dtype("input", norm.input);
  check.has_rows("input", norm.input);
  const auto check_parameter = [&](const char* name, const Tensor* parameter) {
    if (parameter == nullptr) return;
    check.compute_dtype(name, *parameter);
    check.trailing("input", norm.input, *parameter);
    check.same_sizes(name, *parameter, *norm.weight);
  };
  check_parameter("weight", norm.weight);
  check_parameter("bias", norm.bias);
  const TensorSpec statistics = row_statistics(norm.input, dims_of(norm));
  if (norm.mean != nullptr) check.spec("mean", *norm.mean, statistics);
  check.spec("rstd", norm.rstd, statistics);
  return {like(norm.input)};
}

void normalize_cpu(const NormTensors& norm, const Tensor& output) {
  const int64_t width = norm.weight ? norm.weight->numel() : norm.input.size(-1);
  const cpu::Rows x{norm.input, width}, y{output, width}, rstd{norm.rstd, 1};
  const auto parameter = [&](const Tensor* tensor, double add) {
    return tensor ? cpu::to_accumulate(*tensor, norm.input, add) : Tensor();
  };
  const Tensor gamma = parameter(norm.weight, gamma_offset(norm.zero_centered_gamma));
  const Tensor beta = parameter(norm.bias, 0.0);
  const auto data = [](const Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  };
  cpu::parallel(x.count(), width, 1, [&](int64_t begin, int64_t end) {
    const void* mean = norm.mean ? cpu::Rows{*norm.mean, 1}.read(begin) : nullptr;
    cpu::normalize(cpu::kernel_dtype(x.tensor), x.read(begin), mean, rstd.read(begin), data(gamma),
                   data(beta), y.write(begin), end - begin, width);
  });
}

void normalize_cuda(const NormTensors& norm, const Tensor& output) {
  const Tensor& x = norm.input;
  const double gamma_add = gamma_offset(norm.zero_centered_gamma);
  cuda::normalize(cuda::stream_of(x),
                  {.dtype = kernel_dtype(x),
                   .x = cuda::read(x),
                   .mean = norm.mean ? cuda::read(*norm.mean) : nullptr,
                   .rstd = cuda::read(norm.rstd),
                   .gamma = norm.weight ? cuda::vector(*norm.weight, gamma_add) : cuda::Vector(),
                   .beta = norm.bias ? cuda::vector(*norm.bias) : cuda::Vector(),
                   .y = cuda::write(output),
                   .rows = norm.rstd.numel(),
                   .h = norm.weight ? norm.weight->numel() : x.size(-1)});
}

Tensor normalize_unfused(const NormTensors& norm) {
  Tensor x = to_accumulate(norm.input);
  // Statistics have no trailing dimensions.
  const auto by_row = [&](Tensor statistics) {
    for (int64_t i = 0; i < dims_of(norm); ++i) statistics = statistics.unsqueeze(-1);
    return statistics;
  };
  if (norm.mean != nullptr) x = x - by_row(*norm.mean);
  x = x * by_row(norm.rstd);
  if (norm.weight != nullptr) {
    const Tensor gamma = norm.weight->to(x.scalar_type());
    x = x * (norm.zero_centered_gamma ? gamma + 1 : gamma);
  }
  if (norm.bias != nullptr) x = x + norm.bias->to(x.scalar_type());
  return x.to(norm.input.scalar_type());
}

}  // namespace transformer_ops
