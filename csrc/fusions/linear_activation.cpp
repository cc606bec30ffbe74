// backward:  g ─► BasicLinear' ─► activation' ─► [Bias'] ─► g    grad_bias: sums over its rows
//             └─► grad_weight ◄─ y, computed again in the same pass
#include "bodies/activation.h"
#include "bodies/bias.h"
#include "bodies/column_sums.h"
#include "bodies/cpu.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "bodies/linear_recomputed.h"
#include "kernels/activation.h"
#include "kernels/bias.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

std::vector<std::string> activations_that_keep_input() {
  std::vector<std::string> kinds;
  for (const ActivationRow& row : activations()) {
    if (!row.keeps_mask) kinds.push_back(row.kind);
  }
  return kinds;
}

TensorSpecs shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(1));
  check_has_rows(args, "input", args.tensor(1));
  const ActivationRow& row = activation_of(args, 3);
  TORCH_CHECK(!row.keeps_mask, "[", args.op(), "] activation must keep its input, got '", row.name,
              "'");
  TensorSpecs specs = linear_backward_outputs(args, like(args.tensor(1)));
  const TensorSpec bias = bias_gradient(args.tensor(1));
  specs.push_back(args.flag(4) ? bias : TensorSpec{{0}, bias.dtype});
  return specs;
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(1);
  const ActivationRow& row = activation_of(args, 3);
  const auto dtype = cpu::kernel_dtype(input);
  const int64_t stride = input.size(-1);
  linear_recomputed_cpu(args, results, 64, [&](const Tensor& buffer, int64_t first) {
    const cpu::Rows both{buffer, buffer.size(1)}, x{input, stride}, grad_x{results[0], stride};
    const int64_t offset = first * input.element_size();
    const auto pass = [&](int64_t begin, int64_t end, void* sums) {
      cpu::activation_value_and_backward(row.activation, dtype, both.write(begin),
                                         static_cast<const char*>(x.read(begin)) + offset,
                                         static_cast<char*>(grad_x.write(begin)) + offset, sums,
                                         end - begin, both.width, stride);
    };
    if (!args.flag(4)) {
      cpu::parallel(both.count(), both.width, 1,
                    [&](int64_t begin, int64_t end) { pass(begin, end, nullptr); });
      return;
    }
    Tensor grad_bias[] = {results[2].narrow(0, first, both.width)};
    cpu::sum_rows(both.count(), both.width, input, grad_bias,
                  [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                    pass(begin, end, sums[0]);
                  });
  });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor &grad = args.tensor(0), &x = args.tensor(1), &weight = args.tensor(2);
  const ActivationRow& row = activation_of(args, 3);
  const Tensor grad_bias = args.flag(4) ? results[2] : Tensor();
  {
    // Gone before its gradient is made.
    const Tensor y = empty(x.sizes(), x.scalar_type(), x.device());
    activation_forward_cuda(row, x, y, {});
    linear_weight_gradient_cuda(grad, y, results[1], {.adds = args.main_grad().adds});
  }
  if (row.activation == kernel::Activation::GELU &&
      linear_gelu_backward_cuda(grad, weight, x, results[0], grad_bias)) {
    return;
  }
  const Tensor grad_y = linear_input_gradient_cuda(grad, weight);
  const auto stream = cuda::stream_of(x);
  if (!grad_bias.defined()) {
    cuda::activation_backward(stream, row.activation, kernel_dtype(x), cuda::read(grad_y),
                              cuda::read(x), cuda::write(results[0]), x.numel());
    return;
  }
  const cuda::ColumnSums sums(x, grad_bias);
  cuda::activation_bias_backward(stream, row.activation, kernel_dtype(x), cuda::read(grad_y),
                                 cuda::read(x), cuda::write(results[0]), sums.kernel, sums.rows,
                                 sums.width);
}

Tensors backward_unfused(const Args& args) {
  Tensors grads = linear_recomputed_unfused(args, activation_of(args, 3).unfused);
  grads.push_back(args.flag(4) ? grads[0].sum_to_size_symint({grads[0].sym_size(-1)}) : Tensor());
  return grads;
}

std::optional<std::string> why_not(const Match& match) {
  if (match.has(0)) {
    if (auto reason = no_bias_gradient(match)) return reason;
  }
  return why_not_recomputed(match, 1);
}

Bindings bind(const Match& match) {
  return {{"activation", Attribute(activation_of_kind(match.kind(1)).name)},
          {"input", Field{1, "input"}},
          {"with_bias", Attribute(match.has(0))}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_activation",
             .pass = Pass::Backward,
             .benefit = 40,
             .pattern = {optional_op({"Bias"}), activations_that_keep_input(), {"BasicLinear"}},
             .why_not = why_not,
             .bind = bind},
    .backward = {.schema = "linear_activation_backward(Tensor grad_output, Tensor input, "
                           "Tensor weight, str activation, bool with_bias) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
