#include "wrappers/bias.h"

#include "kernels/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops {

void check_bias(const Checks& check, const Tensor& input, const Tensor& bias) {
  check.compute_dtype("bias", bias);
  TORCH_CHECK(bias.dim() == 1, "[", check.op(), "] bias must have 1 dimension, got shape ",
              bias.sym_sizes());
  check.trailing("input", input, bias);
}

void add_bias_cpu(const Tensor& input, const Tensor& bias, const Tensor& output) {
  const cpu::Rows x{input, bias.numel()}, y{output, x.width};
  const Tensor added = cpu::to_accumulate(bias, input);
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::bias_add(cpu::kernel_dtype(input), x.read(begin), added.const_data_ptr(), y.write(begin),
                  end - begin, x.width);
  });
}

void add_bias_cuda(const Tensor& input, const Tensor& bias, const Tensor& output) {
  cuda::bias_add(cuda::stream_of(input), kernel_dtype(input), cuda::read(input), cuda::vector(bias),
                 cuda::write(output), cuda::rows_of(input), input.size(-1));
}

TensorSpec bias_gradient(const Tensor& grad_output) {
  return {{grad_output.sym_size(-1)}, grad_output.scalar_type()};
}

Tensor sum_of_rows(const Tensor& grad_output) {
  return grad_output.sum_to_size_symint({grad_output.sym_size(-1)});
}

void sum_columns_cpu(const Tensor& grad_output, Tensor& grad_bias) {
  const cpu::Rows grad{grad_output, grad_output.size(-1)};
  cpu::sum_rows(grad.count(), grad.width, grad.tensor, std::span(&grad_bias, 1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::column_sum(cpu::kernel_dtype(grad.tensor), grad.read(begin), sums[0],
                                  end - begin, grad.width);
                });
}

void sum_columns_cuda(const Tensor& grad_output, const Tensor& grad_bias) {
  const cuda::ColumnSums sums(grad_output, grad_bias);
  cuda::column_sum(cuda::stream_of(grad_output), kernel_dtype(grad_output), cuda::read(grad_output),
                   sums.kernel, sums.rows, sums.width);
}

std::optional<std::string> no_bias_gradient(const Match& match) {
  if (!match.parameter_requires_grad(0, 0)) return "the bias needs no gradient";
  if (!match.input_requires_grad()) return "the input of the bias needs no gradient";
  return std::nullopt;
}

}  // namespace transformer_ops
