// backward:  g ─► GLU' ─► g_bias ─► Bias' ─► g      both in one pass over the rows
//                            └─► sum over rows: grad_bias
#include "kernels/bias.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"
#include "wrappers/glu.h"

namespace transformer_ops::fused::glu_bias {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const GluArguments& arguments) {
  check.compute_dtype("input", input);
  check.spec("grad_output", grad_output,
             glu_output(check, "input", like(input), read_glu(check, arguments)));
  return {like(input), bias_gradient(input)};
}

void backward_cpu(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const GluArguments& arguments, Tensor& grad_input, Tensor& grad_bias) {
  const cpu::Glu glu = read_glu(check, arguments);
  const cpu::Rows grad{grad_output, grad_output.size(-1)};
  const cpu::Rows x{input, input.size(-1)}, grad_x{grad_input, x.width};
  cpu::sum_rows(x.count(), x.width, input, {&grad_bias, 1},
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::glu_bias_backward(glu, cpu::kernel_dtype(input), grad.read(begin),
                                         x.read(begin), grad_x.write(begin), sums[0], end - begin,
                                         grad.width);
                });
}

void backward_cuda(const Checks& check, const Tensor& grad_output, const Tensor& input,
                   const GluArguments& arguments, Tensor& grad_input, Tensor& grad_bias) {
  const cuda::ColumnSums sums(input, grad_bias);
  cuda::glu_bias_backward(cuda::stream_of(input), read_glu(check, arguments), kernel_dtype(input),
                          cuda::read(grad_output), cuda::read(input), cuda::write(grad_input),
                          sums.kernel, sums.rows, grad_output.size(-1));
}

std::tuple<Tensor, Tensor> backward_decomposed(const Checks& check, const Tensor& grad_output,
                                               const Tensor& input, const GluArguments& arguments) {
  const auto glu = [&](const Tensor& x) {
    return glu_decomposed(glu_of(check, arguments), x, read_glu(check, arguments));
  };
  const auto [grad_input] = gradients(glu, grad_output, input);
  return {grad_input, sum_of_rows(grad_input)};
}

Bindings bind(const Match& match) { return bind_glu(match, 1); }

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "glu_bias",
             .pass = Pass::Backward,
             .benefit = 20,
             .pattern = {{"Bias"}, glu_kinds()},
             .why_not = no_bias_gradient,
             .bind = bind},
    .backward = {.schema = std::string("glu_bias_backward(Tensor grad_output, Tensor input, ") +
                           kGluArguments + ") -> (Tensor grad_input, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {"input"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::glu_bias
