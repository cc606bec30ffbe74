// RMSNorm: y = x * rstd * gamma over the trailing dimensions, rstd = 1 / sqrt(mean(x^2) + eps).
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/norm.h"

namespace transformer_ops::ops::rms_norm {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor* weight,
                          const NormShape& shape, std::optional<double>, bool zero_centered_gamma) {
  check_norm(check, input, weight, nullptr, shape, zero_centered_gamma);
  return {like(input), row_statistics(input, std::ssize(shape))};
}

void forward_cpu(const Tensor& input, const Tensor* weight, const NormShape& shape,
                 std::optional<double> eps, bool zero_centered_gamma, Tensor& output,
                 Tensor& rstd) {
  const cpu::Rows x{input, norm_width(shape)}, y{output, x.width}, rstds{rstd, 1};
  const cpu::NormParameters parameters(input, weight, nullptr, zero_centered_gamma);
  const double epsilon = rms_norm_eps(eps, input);
  // Rows without elements have statistics, too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::rms_norm_forward(cpu::kernel_dtype(input), x.read(begin), parameters.gamma, epsilon,
                          y.write(begin), rstds.write(begin), end - begin, x.width);
  });
}

void forward_cuda(const Tensor& input, const Tensor* weight, const NormShape& shape,
                  std::optional<double> eps, bool zero_centered_gamma, Tensor& output,
                  Tensor& rstd) {
  cuda::norm_forward(cuda::stream_of(input),
                     cuda::norm_of(cuda::Norm::RMSNorm, input, weight, nullptr, shape,
                                   rms_norm_eps(eps, input), zero_centered_gamma, output, rstd));
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& rstd, const Tensor* weight, const NormShape& shape,
                           std::optional<double>, bool, RMSNormMask wanted) {
  check_norm_backward(check, grad_output, input, nullptr, rstd, weight, shape, wanted[1]);
  const auto [wants_input, wants_weight] = wanted;
  return {wants_input ? like(input) : absent(input.scalar_type()),
          norm_gradient(input, weight, shape, wants_weight)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& rstd,
                  const Tensor* weight, const NormShape& shape, std::optional<double>,
                  bool zero_centered_gamma, RMSNormMask wanted, Tensor& grad_input,
                  Tensor& grad_weight) {
  const auto [wants_input, wants_weight] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  const cpu::Rows x{input, norm_width(shape)}, grad{grad_output, x.width}, rstds{rstd, 1};
  const cpu::NormParameters parameters(input, weight, nullptr, zero_centered_gamma);
  const cpu::Rows grad_x{of_input, x.width};
  cpu::sum_rows(
      x.count(), x.width, input, {&grad_weight, wants_weight ? size_t{1} : 0},
      [&, wants_weight = wants_weight](int64_t begin, int64_t end, const std::vector<void*>& sums) {
        cpu::rms_norm_backward(cpu::kernel_dtype(input), grad.read(begin), x.read(begin),
                               rstds.read(begin), parameters.gamma, grad_x.write(begin),
                               wants_weight ? sums[0] : nullptr, end - begin, x.width);
      });
}

void backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& rstd,
                   const Tensor* weight, const NormShape& shape, std::optional<double>,
                   bool zero_centered_gamma, RMSNormMask wanted, Tensor& grad_input,
                   Tensor& grad_weight) {
  const auto [wants_input, wants_weight] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  auto norm = cuda::norm_backward_of(cuda::Norm::RMSNorm, grad_output, input, rstd, weight, shape,
                                     zero_centered_gamma, of_input);
  norm.grad_gamma = cuda::gradient_if(wants_weight, grad_weight);
  cuda::run_norm_backward(input, norm);
}

NormTensors recompute_tensors(const Tensor&, const Tensor& input, const Tensor& rstd,
                              const Tensor* weight, bool zero_centered_gamma) {
  return {input, nullptr, rstd, weight, nullptr, zero_centered_gamma};
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "RMSNorm",
                    .summary = "x * rstd * gamma over the trailing dimensions",
                    .parameters = {"weight"},
                    .attributes = {"normalized_shape", "eps", "zero_centered_gamma"},
                    .slots = {{"input"}, {"rstd"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "rms_norm(Tensor input, Tensor? weight, int[] normalized_shape, "
                          "float? eps, bool zero_centered_gamma) -> (Tensor output, Tensor rstd)",
                .shape = forward_shape,
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, rms_norm_decomposed},
                .by_rows = {"input"}},
    .backward = {.schema = "rms_norm_backward(Tensor grad_output, Tensor input, Tensor rstd, "
                           "Tensor? weight, int[] normalized_shape, float? eps, "
                           "bool zero_centered_gamma, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .overwrites = {"grad_output", "input"},
                 .bodies = {.cpu = backward_cpu, .cuda = backward_cuda}},
    .recompute = recompute_norm("recompute_rms_norm(Tensor grad_output, Tensor input, Tensor rstd, "
                                "Tensor? weight, bool zero_centered_gamma) -> Tensor output",
                                recompute_tensors, {"input", "rstd"}),
});

}  // namespace
}  // namespace transformer_ops::ops::rms_norm
