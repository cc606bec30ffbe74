// backward:  g ─► GLU' ─► g_bias ─► Bias' ─► g      both in one pass over the rows
//                            └─► sum over rows: grad_bias
#include "bodies/bias.h"
#include "bodies/column_sums.h"
#include "bodies/cpu.h"
#include "bodies/glu.h"
#include "kernels/bias.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& input = args.tensor(1);
  check_compute_dtype(args, "input", input);
  check_spec(args, "grad_output", args.tensor(0),
             glu_output(args, "input", like(input), read_any_glu(args, 2)));
  return {like(input), bias_gradient(input)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const cpu::Glu glu = read_any_glu(args, 2);
  const cpu::Rows grad{args.tensor(0), args.tensor(0).size(-1)};
  const cpu::Rows x{args.tensor(1), args.tensor(1).size(-1)}, grad_x{results[0], x.width};
  cpu::sum_rows(x.count(), x.width, x.tensor, std::span(results).subspan(1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                  cpu::glu_bias_backward(glu, cpu::kernel_dtype(x.tensor), grad.read(begin),
                                         x.read(begin), grad_x.write(begin), sums[0], end - begin,
                                         grad.width);
                });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &grad = args.tensor(0), &x = args.tensor(1);
  const cuda::ColumnSums sums(x, results[1]);
  cuda::glu_bias_backward(cuda::stream_of(x), read_any_glu(args, 2), kernel_dtype(x),
                          cuda::read(grad), cuda::read(x), cuda::write(results[0]), sums.kernel,
                          sums.rows, grad.size(-1));
}

Tensors backward_unfused(const Args& args) {
  const auto unfused = [&](const Args& input) {
    return Tensors{glu_unfused(glu_of(args, 2), input.tensor(0), read_any_glu(args, 2))};
  };
  const Tensor grad = differentiate(unfused, args.op(), {args[1]}, args.tensor(0))[0];
  return {grad, grad.sum_to_size_symint({grad.sym_size(-1)})};
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
                 .overwrites = {1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
