#include "wrappers/row_scale.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>

#include "kernels/dropout.h"
#include "kernels/row_scale.h"
#include "op/buffer.h"
#include "wrappers/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops {
namespace {

// The length of the rows that share a factor. In one dimension, each element is a sample.
int64_t width_of(const Tensor& input, const Tensor& factors) {
  return input.dim() == 1 && factors.defined() ? 1 : input.size(-1);
}
int64_t rows_per_factor(int64_t rows, const Tensor& factors) {
  return factors.defined() && factors.numel() > 0 ? std::max<int64_t>(rows / factors.numel(), 1)
                                                  : 1;
}

// In one dimension, gamma and factors belong to the same elements: their product is the gamma of a
// single row.
struct Merged {
  Merged(const Tensor& input, const Tensor* its_gamma, const Tensor& its_factors)
      : gamma(its_gamma), factors(its_factors) {
    if (input.dim() != 1 || gamma == nullptr || !factors.defined()) return;
    product = gamma->to(factors.scalar_type()) * factors;
    gamma = &product;
    factors = Tensor();
  }

  const Tensor* gamma;
  Tensor factors, product;
};

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The factors of the samples, shaped to multiply `like`.
Tensor by_sample(const Tensor& factors, const Tensor& like) {
  Tensor found = factors;
  for (int64_t i = 1; i < like.dim(); ++i) found = found.unsqueeze(-1);
  return found;
}

}  // namespace

void check_gamma(const Checks& check, const Tensor& input, const Tensor* gamma) {
  check.compute_dtype("input", input);
  if (gamma == nullptr) return;
  check.compute_dtype("gamma", *gamma);
  TORCH_CHECK(gamma->dim() == 1, "[", check.op(), "] gamma must have 1 dimension, got shape ",
              gamma->sym_sizes());
  check.trailing("input", input, *gamma);
}

TensorSpec sample_factors(const Checks& check, const Tensor& input) {
  check.has_rows("input", input);
  return {{input.sym_size(0)}, accumulate_dtype(input.scalar_type())};
}

void draw_factors_cpu(double p, Tensor& factors) {
  const Tensor ones = at::ones(factors.sizes(), factors.options());
  cpu::dropout_forward(cpu::kernel_dtype(ones), ones.const_data_ptr(), factors.mutable_data_ptr(),
                       nullptr, draw_seed(p), p, 0, ones.numel());
}

void draw_factors_cuda(double p, Tensor& factors) {
  const Tensor ones = at::ones(factors.sizes(), factors.options());
  cuda::dropout_forward(cuda::stream_of(ones), kernel_dtype(ones), cuda::read(ones),
                        cuda::write(factors), nullptr, draw_philox(ones.device(), p), p,
                        ones.numel());
}

Tensor draw_factors_decomposed(const Tensor& input, double p) {
  const auto dtype = accumulate_dtype(input.scalar_type());
  const Tensor ones = at::ones_symint({input.sym_size(0)}, input.options().dtype(dtype));
  return at::dropout(ones, p, /*train=*/true);
}

void scale_rows_cpu(const Tensor& input, const Tensor* gamma, const Tensor& factors,
                    const Tensor* extra, Tensor& output) {
  const Merged by(input, gamma, factors);
  const cpu::Rows x{input, width_of(input, by.factors)}, y{output, x.width};
  const Tensor columns = by.gamma != nullptr ? cpu::to_accumulate(*by.gamma, input) : Tensor();
  const cpu::RowScale scale{data_or_null(columns), data_or_null(by.factors),
                            rows_per_factor(x.count(), by.factors)};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    const void* more = extra != nullptr ? cpu::Rows{*extra, x.width}.read(begin) : nullptr;
    cpu::row_scale(cpu::kernel_dtype(input), x.read(begin), scale, more, y.write(begin), begin,
                   end - begin, x.width);
  });
}

void scale_rows_cuda(const Tensor& input, const Tensor* gamma, const Tensor& factors,
                     const Tensor* extra, Tensor& output) {
  if (input.numel() == 0) return;
  const Merged by(input, gamma, factors);
  const int64_t width = width_of(input, by.factors), rows = input.numel() / width;
  const cuda::RowScale scale{by.gamma != nullptr ? cuda::vector(*by.gamma) : cuda::Vector(),
                             data_or_null(by.factors), rows_per_factor(rows, by.factors)};
  cuda::row_scale(cuda::stream_of(input), kernel_dtype(input), cuda::read(input), scale,
                  extra != nullptr ? cuda::read(*extra) : nullptr, cuda::write(output), rows,
                  width);
}

Tensor scale_rows_decomposed(const Tensor& input, const Tensor* gamma, const Tensor& factors) {
  Tensor x = to_accumulate(input);
  if (gamma != nullptr) x = x * gamma->to(x.scalar_type());
  if (factors.defined()) x = x * by_sample(factors, input);
  return x.to(input.scalar_type());
}

TensorSpecs scale_backward_shape(const Checks& check, const Tensor& grad_output,
                                 const Tensor* input, const Tensor* gamma, ScaleMask wanted) {
  const auto [wants_input, wants_gamma] = wanted;
  check_gamma(check, grad_output, gamma);
  TORCH_CHECK(!wants_gamma || (gamma != nullptr && input != nullptr), "[", check.op(),
              "] input and gamma must be given for the gradient of gamma, got None");
  if (input != nullptr) check.spec("input", *input, like(grad_output));
  const auto dtype = grad_output.scalar_type();
  const TensorSpec of_gamma = wants_gamma ? TensorSpec{{gamma->sym_size(0)}, dtype} : absent(dtype);
  return {wants_input ? like(grad_output) : absent(dtype), of_gamma};
}

void scale_backward_cpu(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                        const Tensor& factors, ScaleMask wanted, Tensor& grad_input,
                        Tensor& grad_gamma) {
  const auto [wants_input, wants_gamma] = wanted;
  if (!wants_gamma) {
    if (wants_input) scale_rows_cpu(grad_output, gamma, factors, nullptr, grad_input);
    return;
  }
  // In one dimension the gradient, and so the sums, already include the factors.
  if (grad_output.dim() == 1 && factors.defined()) {
    const Tensor scaled = grad_output * factors.to(grad_output.scalar_type());
    return scale_backward_cpu(scaled, input, gamma, {}, wanted, grad_input, grad_gamma);
  }
  const Tensor of_input = memory_for(grad_input, wants_input, grad_output);
  const cpu::Rows grad{grad_output, grad_output.size(-1)}, x{*input, grad.width};
  const cpu::Rows grad_x{of_input, grad.width};
  const Tensor columns = cpu::to_accumulate(*gamma, grad_output);
  const cpu::RowScale scale{columns.const_data_ptr(), data_or_null(factors),
                            rows_per_factor(grad.count(), factors)};
  cpu::sum_rows(grad.count(), grad.width, grad_output, {&grad_gamma, 1},
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::row_scale_backward(cpu::kernel_dtype(grad_output), grad.read(begin),
                                          x.read(begin), scale, grad_x.write(begin), sums[0], begin,
                                          end - begin, grad.width);
                });
}

void scale_backward_cuda(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                         const Tensor& factors, ScaleMask wanted, Tensor& grad_input,
                         Tensor& grad_gamma) {
  const auto [wants_input, wants_gamma] = wanted;
  if (!wants_gamma) {
    if (wants_input) scale_rows_cuda(grad_output, gamma, factors, nullptr, grad_input);
    return;
  }
  if (grad_output.dim() == 1 && factors.defined()) {
    const Tensor scaled = grad_output * factors.to(grad_output.scalar_type());
    return scale_backward_cuda(scaled, input, gamma, {}, wanted, grad_input, grad_gamma);
  }
  const Tensor of_input = memory_for(grad_input, wants_input, grad_output);
  const cuda::ColumnSums sums(grad_output, grad_gamma);
  const cuda::RowScale scale{cuda::vector(*gamma), data_or_null(factors),
                             rows_per_factor(sums.rows, factors)};
  cuda::row_scale_backward(cuda::stream_of(grad_output), kernel_dtype(grad_output),
                           cuda::read(grad_output), cuda::read(*input), scale,
                           cuda::write(of_input), sums.kernel, sums.rows, sums.width);
}

std::tuple<Tensor, Tensor> scale_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                     const Tensor* gamma, const Tensor& factors,
                                                     ScaleMask wanted) {
  const auto [wants_input, wants_gamma] = wanted;
  Tensor grad_gamma;
  if (wants_gamma) {
    const Tensor grad = scale_rows_decomposed(to_accumulate(grad_output), nullptr, factors);
    grad_gamma = sum_of_rows(grad * to_accumulate(*input)).to(grad_output.scalar_type());
  }
  return {wants_input ? scale_rows_decomposed(grad_output, gamma, factors) : Tensor(), grad_gamma};
}

}  // namespace transformer_ops
