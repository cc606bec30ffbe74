// backward:  g ─► BasicLinear' ─► activation' ─► [Bias'] ─► g    grad_bias: sums over its rows
//             └─► grad_weight ◄─ y, recomputed in the same pass
#include "kernels/activation.h"
#include "kernels/bias.h"
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/activation.h"
#include "wrappers/bias.h"
#include "wrappers/column_sums.h"
#include "wrappers/cpu.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"
#include "wrappers/linear_recomputed.h"

namespace transformer_ops::fused::linear_activation {
namespace {

std::vector<std::string> activations_that_keep_input() {
  std::vector<std::string> kinds;
  for (const ActivationRow& row : activations()) {
    if (!row.keeps_mask) kinds.push_back(row.kind);
  }
  return kinds;
}

// The flags of the wanted results among (grad_input, grad_weight, grad_bias).
using Mask = std::array<bool, 3>;

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, std::string_view activation, Mask wanted) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const ActivationRow& row = activation_of(check, activation);
  TORCH_CHECK(!row.keeps_mask, "[", check.op(), "] activation must keep its input, got '", row.name,
              "'");
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, like(input));
  specs.push_back(bias_gradient(input));
  for (size_t k = 0; k < specs.size(); ++k) {
    if (!wanted[k]) specs[k] = absent(input.scalar_type());
  }
  return specs;
}

// The bias gradient is the sum of the input gradient.
RecomputedParts parts_of(Mask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  return {.grad_y = wants_input || wants_bias, .weight = wants_weight};
}

void backward_cpu(const Call& call, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, std::string_view activation, Mask wanted,
                  Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const ActivationRow& row = activation_of(call, activation);
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  const auto dtype = cpu::kernel_dtype(input);
  const int64_t stride = input.size(-1);
  const auto pass = [&, wants_bias = wants_bias](const Tensor& buffer, int64_t first) {
    const cpu::Rows both{buffer, buffer.size(1)}, x{input, stride}, grad_x{of_input, stride};
    const int64_t offset = first * input.element_size();
    const auto add_rows = [&](int64_t begin, int64_t end, void* sums) {
      cpu::activation_value_and_backward(row.activation, dtype, both.write(begin),
                                         static_cast<const char*>(x.read(begin)) + offset,
                                         static_cast<char*>(grad_x.write(begin)) + offset, sums,
                                         end - begin, both.width, stride);
    };
    if (!wants_bias) {
      cpu::parallel(both.count(), both.width, 1,
                    [&](int64_t begin, int64_t end) { add_rows(begin, end, nullptr); });
      return;
    }
    Tensor columns[] = {grad_bias.narrow(0, first, both.width)};
    cpu::sum_rows(both.count(), both.width, input, columns,
                  [&](int64_t begin, int64_t end, const std::vector<void*>& sums) {
                    add_rows(begin, end, sums[0]);
                  });
  };
  linear_recomputed_cpu(call, grad_output, weight, parts_of(wanted), grad_weight, stride, 64, pass);
}

void backward_cuda(const Call& call, const Tensor& grad_output, const Tensor& input,
                   const Tensor& weight, std::string_view activation, Mask wanted,
                   Tensor& grad_input, Tensor& grad_weight, Tensor& grad_bias) {
  const ActivationRow& row = activation_of(call, activation);
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  if (wants_weight) {
    // y is freed before its gradient is allocated.
    const Tensor y = empty(input.sizes(), input.scalar_type(), input.device());
    activation_forward_cuda(row, input, y, {});
    linear_weight_gradient_cuda(grad_output, y, grad_weight, {.adds = call.main_grad().adds});
  }
  if (!wants_input && !wants_bias) return;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  // cuBLASLt's DGELU epilogue rounds the product before it multiplies, and takes longer: on an H100
  // a kernel of its own (docs/gpu/README.md).
  const Tensor grad_y = linear_input_gradient_cuda(grad_output, weight);
  const auto stream = cuda::stream_of(input);
  if (!wants_bias) {
    cuda::activation_backward(stream, row.activation, kernel_dtype(input), cuda::read(grad_y),
                              cuda::read(input), cuda::write(of_input), input.numel());
    return;
  }
  const cuda::ColumnSums sums(input, grad_bias);
  cuda::activation_bias_backward(stream, row.activation, kernel_dtype(input), cuda::read(grad_y),
                                 cuda::read(input), cuda::write(of_input), sums.kernel, sums.rows,
                                 sums.width);
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Checks& check,
                                                       const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& weight,
                                                       std::string_view activation, Mask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto [grad_input, grad_weight] = linear_recomputed_decomposed(
      grad_output, input, weight, parts_of(wanted), activation_of(check, activation).decomposition);
  return {wants_input ? grad_input : Tensor(), grad_weight,
          wants_bias ? sum_of_rows(grad_input) : Tensor()};
}

std::optional<std::string> why_not(const Match& match) {
  if (match.has(0)) {
    if (auto reason = no_bias_gradient(match)) return reason;
  }
  return why_not_recomputed(match, 1);
}

Bindings bind(const Match& match) {
  return {{"activation", Attribute(activation_of_kind(match.kind(1)).name)},
          {"input", Field{1, "input"}}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_activation",
             .pass = Pass::Backward,
             .benefit = 40,
             .pattern = {optional_op({"Bias"}), activations_that_keep_input(), {"BasicLinear"}},
             .why_not = why_not,
             .bind = bind},
    .backward = {.schema = "linear_activation_backward(Tensor grad_output, Tensor input, "
                           "Tensor weight, str activation, bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                 .shape = shape,
                 .overwrites = {"input"},
                 .products = {.list = {{"weight", {"grad_input", "grad_bias"}}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::fused::linear_activation
