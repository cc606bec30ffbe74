// backward:  g ─► activation' ─► g_bias ─► Bias' ─► g      dact and dbias in one pass over the rows
//                                   └─► sum over rows: grad_bias
#include "kernels/bias.h"
#include "op/op.h"
#include "wrappers/activation.h"
#include "wrappers/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"

namespace transformer_ops::fused::activation_bias {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& kept,
                  std::string_view activation) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  const bool is_mask = activation_of(check, activation).keeps_mask;
  check.spec("kept", kept, is_mask ? bit_mask(grad_output) : like(grad_output));
  return {like(grad_output), bias_gradient(grad_output)};
}

void backward_cpu(const Checks& check, const Tensor& grad_output, const Tensor& kept,
                  std::string_view activation, Tensor& grad_input, Tensor& grad_bias) {
  const ActivationRow& row = activation_of(check, activation);
  const cpu::Rows grad{grad_output, grad_output.size(-1)};
  const cpu::Rows saved{kept, grad.width}, grad_x{grad_input, grad.width};
  const auto dtype = cpu::kernel_dtype(grad_output);
  cpu::sum_rows(grad.count(), grad.width, grad_output, {&grad_bias, 1},
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  if (!row.keeps_mask) {
                    cpu::activation_bias_backward(row.activation, dtype, grad.read(begin),
                                                  saved.read(begin), grad_x.write(begin), sums[0],
                                                  end - begin, grad.width);
                    return;
                  }
                  cpu::relu_bias_backward(dtype, grad.read(begin), kept.const_data_ptr<uint8_t>(),
                                          begin * grad.width, grad_x.write(begin), sums[0],
                                          end - begin, grad.width);
                });
}

void backward_cuda(const Checks& check, const Tensor& grad_output, const Tensor& kept,
                   std::string_view activation, Tensor& grad_input, Tensor& grad_bias) {
  const ActivationRow& row = activation_of(check, activation);
  const cuda::ColumnSums sums(grad_output, grad_bias);
  const auto stream = cuda::stream_of(grad_output);
  const auto dtype = kernel_dtype(grad_output);
  if (row.keeps_mask) {
    cuda::relu_bias_backward(stream, dtype, cuda::read(grad_output), kept.const_data_ptr<uint8_t>(),
                             cuda::write(grad_input), sums.kernel, sums.rows, sums.width);
  } else {
    cuda::activation_bias_backward(stream, row.activation, dtype, cuda::read(grad_output),
                                   cuda::read(kept), cuda::write(grad_input), sums.kernel,
                                   sums.rows, sums.width);
  }
}

std::tuple<Tensor, Tensor> backward_decomposed(const Checks& check, const Tensor& grad_output,
                                               const Tensor& kept, std::string_view activation) {
  const Tensor grad =
      activation_gradient_decomposed(activation_of(check, activation), grad_output, kept);
  return {grad, sum_of_rows(grad)};
}

Bindings bind(const Match& match) {
  const ActivationRow& row = activation_of_kind(match.kind(1));
  return {{"activation", Attribute(row.name)},
          {"kept", Field{1, row.keeps_mask ? "mask" : "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "activation_bias",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"Bias"}, activation_kinds()},
             .why_not = no_bias_gradient,
             .bind = bind},
    .backward = {.schema = "activation_bias_backward(Tensor grad_output, Tensor kept, "
                           "str activation) -> (Tensor grad_input, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {"grad_output", "kept"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::activation_bias
