// backward:  g ─► Dropout' ─► g_bias ─► Bias' ─► g      mask and sum in one pass over the rows
//                                └─► sum over rows: grad_bias
#include "kernels/bias.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"
#include "wrappers/dropout.h"

namespace transformer_ops::fused::dropout_bias {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& mask, double p) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  check.spec("mask", mask, bit_mask(grad_output));
  check_probability(check, p);
  return {like(grad_output), bias_gradient(grad_output)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& mask, double p, Tensor& grad_input,
                  Tensor& grad_bias) {
  const cpu::Rows grad{grad_output, grad_output.size(-1)}, grad_x{grad_input, grad.width};
  const auto* const bits = mask.const_data_ptr<uint8_t>();
  cpu::sum_rows(grad.count(), grad.width, grad_output, {&grad_bias, 1},
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::dropout_bias_backward(cpu::kernel_dtype(grad_output), grad.read(begin), bits,
                                             begin * grad.width, p, grad_x.write(begin), sums[0],
                                             end - begin, grad.width);
                });
}

void backward_cuda(const Tensor& grad_output, const Tensor& mask, double p, Tensor& grad_input,
                   Tensor& grad_bias) {
  const cuda::ColumnSums sums(grad_output, grad_bias);
  cuda::dropout_bias_backward(cuda::stream_of(grad_output), kernel_dtype(grad_output),
                              cuda::read(grad_output), mask.const_data_ptr<uint8_t>(), p,
                              cuda::write(grad_input), sums.kernel, sums.rows, sums.width);
}

std::tuple<Tensor, Tensor> backward_decomposed(const Tensor& grad_output, const Tensor& mask,
                                               double p) {
  const Tensor grad = dropout_decomposed(grad_output, mask, p);
  return {grad, sum_of_rows(grad)};
}

std::optional<std::string> why_not(const Match& match) {
  if (match.is_idle(1)) return "the dropout is off";
  return no_bias_gradient(match);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "dropout_bias",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"Bias"}, {"Dropout"}},
             .why_not = why_not},
    .backward = {.schema = "dropout_bias_backward(Tensor grad_output, Tensor mask, float p) -> "
                           "(Tensor grad_input, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {"grad_output"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::dropout_bias
