#include "wrappers/norm.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>

#include <limits>
#include <numeric>

#include "wrappers/cpu.h"

namespace transformer_ops {
namespace {

// The number of normalized dimensions: statistics do not have them.
int64_t dims_of(const NormTensors& norm) { return norm.input.dim() - norm.rstd.dim(); }

Tensor scaled(const Tensor& x, const Tensor& weight, bool zero_centered_gamma) {
  const Tensor gamma = weight.to(x.scalar_type());
  return x * (zero_centered_gamma ? gamma + 1 : gamma);
}

// The gradients of the input and, if there is one, of the weight.
template <typename Norm>
Tensors gradients_of_norm(const Norm& norm, const Tensor& grad_output, const Tensor& input,
                          const Tensor* weight) {
  const auto of_list = [&](const Tensors& list) {
    return norm(list[0], weight != nullptr ? &list[1] : nullptr);
  };
  Tensors inputs = {input};
  if (weight != nullptr) inputs.push_back(*weight);
  Tensors grads = differentiate(of_list, inputs, grad_output);
  grads.resize(2);
  return grads;
}

}  // namespace

// ---- checks

void check_norm(const Checks& check, const Tensor& input, const Tensor* weight, const Tensor* bias,
                const NormShape& shape, bool zero_centered_gamma) {
  check.compute_dtype("input", input);
  const auto wanted = c10::fromIntArrayRefSlow(shape);
  TORCH_CHECK(!shape.empty(), "[", check.op(),
              "] normalized_shape must have at least 1 dimension, got 0");
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(
      sizes.size() >= wanted.size() && sizes.slice(sizes.size() - wanted.size()).equals(wanted),
      "[", check.op(), "] input must end in dimensions ", wanted, ", got shape ", sizes);
  const auto check_parameter = [&](const char* name, const Tensor* parameter) {
    if (parameter == nullptr) return;
    check.compute_dtype(name, *parameter);
    TORCH_CHECK(parameter->sym_sizes().equals(wanted), "[", check.op(), "] ", name,
                " must have shape ", wanted, ", got ", parameter->sym_sizes());
  };
  check_parameter("weight", weight);
  check_parameter("bias", bias);
  TORCH_CHECK(weight != nullptr || !zero_centered_gamma, "[", check.op(),
              "] zero_centered_gamma must be false without a weight, got true");
}

void check_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                         const Tensor* mean, const Tensor& rstd, const Tensor* weight,
                         const NormShape& shape, bool wants_weight) {
  check_norm(check, input, weight, nullptr, shape, /*zero_centered_gamma=*/false);
  check.spec("grad_output", grad_output, like(input));
  const TensorSpec statistics = row_statistics(input, std::ssize(shape));
  check.spec("rstd", rstd, statistics);
  if (mean != nullptr) check.spec("mean", *mean, statistics);
  TORCH_CHECK(weight != nullptr || !wants_weight, "[", check.op(),
              "] output_mask must be false for the gradient of a weight that is None, got true");
}

TensorSpec norm_gradient(const Tensor& input, const Tensor* weight, const NormShape& shape,
                         bool wanted) {
  const at::ScalarType dtype = (weight != nullptr ? *weight : input).scalar_type();
  if (!wanted) return absent(dtype);
  return {c10::SymDimVector(shape.begin(), shape.end()), dtype};
}

// ---- decompositions

Tensor layer_norm_decomposed(const Tensor& input, const Tensor* weight, const Tensor* bias,
                             const NormShape& shape, double eps, bool zero_centered_gamma) {
  const Tensor x = to_accumulate(input);
  const auto parameter = [&](const Tensor* tensor) {
    return tensor != nullptr ? tensor->to(x.scalar_type()) : Tensor();
  };
  const Tensor gamma = parameter(weight);
  const Tensor y =
      at::layer_norm(x, shape, zero_centered_gamma ? gamma + 1 : gamma, parameter(bias), eps);
  return y.to(input.scalar_type());
}

double rms_norm_eps(std::optional<double> eps, const Tensor& input) {
  if (eps) return *eps;
  return accumulate_dtype(input.scalar_type()) == at::kDouble
             ? std::numeric_limits<double>::epsilon()
             : std::numeric_limits<float>::epsilon();
}

Tensor rms_norm_decomposed(const Tensor& input, const Tensor* weight, const NormShape& shape,
                           std::optional<double> eps, bool zero_centered_gamma) {
  const Tensor x = to_accumulate(input);
  std::vector<int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), -std::ssize(shape));
  const Tensor squares = at::mean(x.square(), dims, /*keepdim=*/true);
  Tensor y = x * at::rsqrt(squares + rms_norm_eps(eps, input));
  if (weight != nullptr) y = scaled(y, *weight, zero_centered_gamma);
  return y.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(const Tensor& grad_output,
                                                        const Tensor& input, const Tensor* weight,
                                                        const NormShape& shape, double eps,
                                                        bool zero_centered_gamma,
                                                        LayerNormMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto norm = [&](const Tensor& x, const Tensor* gamma) {
    return layer_norm_decomposed(x, gamma, nullptr, shape, eps, zero_centered_gamma);
  };
  const Tensors grads = gradients_of_norm(norm, grad_output, input, weight);
  Tensor grad_bias;
  if (wants_bias) {
    const auto dtype = (weight != nullptr ? *weight : input).scalar_type();
    grad_bias = to_accumulate(grad_output).sum_to_size(shape).to(dtype);
  }
  return {wants_input ? grads[0] : Tensor(), wants_weight ? grads[1] : Tensor(), grad_bias};
}

std::tuple<Tensor, Tensor> rms_norm_gradients(const Tensor& grad_output, const Tensor& input,
                                              const Tensor* weight, const NormShape& shape,
                                              std::optional<double> eps, bool zero_centered_gamma,
                                              RMSNormMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  const auto norm = [&](const Tensor& x, const Tensor* gamma) {
    return rms_norm_decomposed(x, gamma, shape, rms_norm_eps(eps, input), zero_centered_gamma);
  };
  const Tensors grads = gradients_of_norm(norm, grad_output, input, weight);
  return {wants_input ? grads[0] : Tensor(), wants_weight ? grads[1] : Tensor()};
}

// ---- kernels

int64_t norm_width(const NormShape& shape) { return c10::multiply_integers(shape); }

namespace cpu {

namespace {

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

}  // namespace

NormParameters::NormParameters(const Tensor& input, const Tensor* weight, const Tensor* bias,
                               bool zero_centered_gamma)
    : gamma_tensor(weight != nullptr
                       ? to_accumulate(*weight, input, gamma_offset(zero_centered_gamma))
                       : Tensor()),
      beta_tensor(bias != nullptr ? to_accumulate(*bias, input) : Tensor()),
      gamma(data_or_null(gamma_tensor)),
      beta(data_or_null(beta_tensor)) {}

}  // namespace cpu

namespace cuda {

namespace {

Vector vector_or_none(const Tensor* parameter, double add = 0.0) {
  return parameter != nullptr ? vector(*parameter, add) : Vector();
}

}  // namespace

NormForward norm_of(Norm norm, const Tensor& input, const Tensor* weight, const Tensor* bias,
                    const NormShape& shape, double eps, bool zero_centered_gamma,
                    const Tensor& output, const Tensor& rstd) {
  return {.norm = norm,
          .dtype = kernel_dtype(input),
          .x = read(input),
          .gamma = vector_or_none(weight, gamma_offset(zero_centered_gamma)),
          .beta = vector_or_none(bias),
          .eps = eps,
          .y = write(output),
          .rstd = write(rstd),
          .rows = rstd.numel(),
          .h = norm_width(shape)};
}

NormBackward norm_backward_of(Norm norm, const Tensor& grad_output, const Tensor& input,
                              const Tensor& rstd, const Tensor* weight, const NormShape& shape,
                              bool zero_centered_gamma, const Tensor& grad_input) {
  return {.norm = norm,
          .dtype = kernel_dtype(input),
          .grad_y = read(grad_output),
          .x = read(input),
          .rstd = read(rstd),
          .gamma = vector_or_none(weight, gamma_offset(zero_centered_gamma)),
          .residual_dtype = kernel_dtype(input),
          .grad_x = write(grad_input),
          .rows = rstd.numel(),
          .h = norm_width(shape)};
}

Gradient gradient_if(bool wanted, const Tensor& gradient) {
  return wanted ? cuda::gradient(gradient) : Gradient();
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

// ---- recomputation

TensorSpecs normalize_shape(const Checks& check, const NormTensors& norm) {
  check.compute_dtype("input", norm.input);
  check.has_rows("input", norm.input);
  const int64_t dims = dims_of(norm);
  TORCH_CHECK(dims >= 1, "[", check.op(), "] rstd must have less dimensions than input, ",
              norm.input.dim(), ", got ", norm.rstd.dim());
  const auto wanted = norm.input.sym_sizes().slice(norm.rstd.dim());
  const auto check_parameter = [&](const char* name, const Tensor* parameter) {
    if (parameter == nullptr) return;
    check.compute_dtype(name, *parameter);
    check.trailing("input", norm.input, *parameter);
    TORCH_CHECK(parameter->dim() == dims, "[", check.op(), "] ", name, " must have shape ", wanted,
                ", got ", parameter->sym_sizes());
  };
  check_parameter("weight", norm.weight);
  check_parameter("bias", norm.bias);
  const TensorSpec statistics = row_statistics(norm.input, dims);
  if (norm.mean != nullptr) check.spec("mean", *norm.mean, statistics);
  check.spec("rstd", norm.rstd, statistics);
  return {like(norm.input)};
}

namespace {

int64_t width_of(const NormTensors& norm) {
  return c10::multiply_integers(norm.input.sizes().slice(norm.rstd.dim()));
}

}  // namespace

void normalize_cpu(const NormTensors& norm, const Tensor& output) {
  const int64_t width = width_of(norm);
  const cpu::Rows x{norm.input, width}, y{output, width}, rstd{norm.rstd, 1};
  const cpu::NormParameters parameters(norm.input, norm.weight, norm.bias,
                                       norm.zero_centered_gamma);
  cpu::parallel(x.count(), width, 1, [&](int64_t begin, int64_t end) {
    const void* mean = norm.mean ? cpu::Rows{*norm.mean, 1}.read(begin) : nullptr;
    cpu::normalize(cpu::kernel_dtype(x.tensor), x.read(begin), mean, rstd.read(begin),
                   parameters.gamma, parameters.beta, y.write(begin), end - begin, width);
  });
}

void normalize_cuda(const NormTensors& norm, const Tensor& output) {
  const Tensor& x = norm.input;
  const double gamma_add = gamma_offset(norm.zero_centered_gamma);
  cuda::normalize(cuda::stream_of(x), {.dtype = kernel_dtype(x),
                                       .x = cuda::read(x),
                                       .mean = norm.mean ? cuda::read(*norm.mean) : nullptr,
                                       .rstd = cuda::read(norm.rstd),
                                       .gamma = cuda::vector_or_none(norm.weight, gamma_add),
                                       .beta = cuda::vector_or_none(norm.bias),
                                       .y = cuda::write(output),
                                       .rows = norm.rstd.numel(),
                                       .h = width_of(norm)});
}

Tensor normalize_decomposed(const NormTensors& norm) {
  Tensor x = to_accumulate(norm.input);
  const auto by_row = [&](Tensor statistics) {
    for (int64_t i = 0; i < dims_of(norm); ++i) statistics = statistics.unsqueeze(-1);
    return statistics;
  };
  if (norm.mean != nullptr) x = x - by_row(*norm.mean);
  x = x * by_row(norm.rstd);
  if (norm.weight != nullptr) x = scaled(x, *norm.weight, norm.zero_centered_gamma);
  if (norm.bias != nullptr) x = x + norm.bias->to(x.scalar_type());
  return x.to(norm.input.scalar_type());
}

}  // namespace transformer_ops
