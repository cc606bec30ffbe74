// backward:  g ─► activation' ─► g_bias ─► Bias' ─► g      dact and dbias in one pass over the rows
//                                   └─► sum over rows: grad_bias
#include "bodies/activation.h"
#include "bodies/bias.h"
#include "bodies/column_sums.h"
#include "bodies/cpu.h"
#include "kernels/bias.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& grad = args.tensor(0);
  const Tensor& kept = args.tensor(1);
  check_compute_dtype(args, "grad_output", grad);
  check_has_rows(args, "grad_output", grad);
  const bool is_mask = activation_of(args, 2).keeps_mask;
  check_spec(args, "kept", kept, is_mask ? bit_mask(grad) : like(grad));
  return {like(grad), bias_gradient(grad)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const ActivationRow& row = activation_of(args, 2);
  const cpu::Rows grad{args.tensor(0), args.tensor(0).size(-1)};
  const cpu::Rows kept{args.tensor(1), grad.width}, grad_x{results[0], grad.width};
  const auto dtype = cpu::kernel_dtype(grad.tensor);
  cpu::sum_rows(grad.count(), grad.width, grad.tensor, std::span(results).subspan(1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  if (!row.keeps_mask) {
                    cpu::activation_bias_backward(row.activation, dtype, grad.read(begin),
                                                  kept.read(begin), grad_x.write(begin), sums[0],
                                                  end - begin, grad.width);
                    return;
                  }
                  cpu::relu_bias_backward(dtype, grad.read(begin),
                                          kept.tensor.const_data_ptr<uint8_t>(), begin * grad.width,
                                          grad_x.write(begin), sums[0], end - begin, grad.width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const ActivationRow& row = activation_of(args, 2);
  const Tensor &grad = args.tensor(0), &kept = args.tensor(1);
  const cuda::ColumnSums sums(grad, results[1]);
  const auto stream = cuda::stream_of(grad);
  if (row.keeps_mask) {
    cuda::relu_bias_backward(stream, kernel_dtype(grad), cuda::read(grad),
                             kept.const_data_ptr<uint8_t>(), cuda::write(results[0]), sums.kernel,
                             sums.rows, sums.width);
  } else {
    cuda::activation_bias_backward(stream, row.activation, kernel_dtype(grad), cuda::read(grad),
                                   cuda::read(kept), cuda::write(results[0]), sums.kernel,
                                   sums.rows, sums.width);
  }
}

Tensors backward_unfused(const Args& args) {
  const Tensor grad =
      activation_gradient_unfused(activation_of(args, 2), args.tensor(0), args.tensor(1));
  return {grad, grad.sum_to_size_symint({grad.sym_size(-1)})};
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
                 .overwrites = {0, 1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
