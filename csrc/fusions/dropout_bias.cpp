// backward:  g ─► Dropout' ─► g_bias ─► Bias' ─► g      mask and sum in one pass over the rows
//                                └─► sum over rows: grad_bias
#include <ATen/ops/sum.h>

#include "bodies/bias.h"
#include "bodies/column_sums.h"
#include "bodies/cpu.h"
#include "bodies/dropout.h"
#include "kernels/bias.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& grad = args.tensor(0);
  check_compute_dtype(args, "grad_output", grad);
  check_has_rows(args, "grad_output", grad);
  check_spec(args, "mask", args.tensor(1), bit_mask(grad));
  check_probability(args, args.number(2));
  return {like(grad), bias_gradient(grad)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows grad{args.tensor(0), args.tensor(0).size(-1)}, grad_x{results[0], grad.width};
  const auto* mask = args.tensor(1).const_data_ptr<uint8_t>();
  cpu::sum_rows(grad.count(), grad.width, grad.tensor, std::span(results).subspan(1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::dropout_bias_backward(cpu::kernel_dtype(grad.tensor), grad.read(begin), mask,
                                             begin * grad.width, args.number(2),
                                             grad_x.write(begin), sums[0], end - begin, grad.width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  const cuda::ColumnSums sums(grad, results[1]);
  cuda::dropout_bias_backward(cuda::stream_of(grad), kernel_dtype(grad), cuda::read(grad),
                              args.tensor(1).const_data_ptr<uint8_t>(), args.number(2),
                              cuda::write(results[0]), sums.kernel, sums.rows, sums.width);
}

Tensors backward_unfused(const Args& args) {
  const Tensor grad = find_typed_op("dropout_backward")->unfused(args)[0];
  return {grad, grad.sum_to_size_symint({grad.sym_size(-1)})};
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
                 .overwrites = {0},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
