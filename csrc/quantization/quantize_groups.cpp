// quantize_dequantize and hadamard_columns for the operands of grouped products. Each group is a
// tensor of its own, so no block and no scale spans two groups.
#include <ATen/ops/stack.h>

#include "op/op.h"
#include "op/recompute.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/dropout.h"
#include "wrappers/grouped.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops::ops::quantize_groups {
namespace {

TensorSpecs groups_shape(const Checks& check, const Tensors& input, const Tensor* splits,
                         std::string_view format, std::string_view dtype) {
  check_rounded_groups(check, input, splits);
  format_of(check, format);
  TensorSpec specs = like(input);
  for (TensorSpec& spec : *specs.list) spec.dtype = dtype_named(check, dtype);
  return {specs};
}

// Calls each(matrix of input, matrix of output, number of its first row) for each group; rows that
// are in no group become zeros.
template <typename Each>
void group_by_group_cpu(const Checks& check, const Tensors& input, const Tensor* splits,
                        const Tensors& output, const Each& each) {
  const RoundedGroups x = rounded_groups(check, input, splits);
  const RoundedGroups y = rounded_groups(check, output, splits);
  int64_t first = 0;
  for (size_t i = 0; i < x.matrices.size(); ++i) {
    const int64_t count = x.matrices[i].size(0);
    if (count > 0) each(x.matrices[i], y.matrices[i], first);
    first += count;
  }
  if (y.rest.defined()) y.rest.zero_();
}

void groups_cpu(const Checks& check, const Tensors& input, const Tensor* splits,
                std::string_view format_name, std::string_view, Tensors& output) {
  const kernel::Format& format = format_of(check, format_name);
  group_by_group_cpu(check, input, splits, output, [&](const Tensor& x, const Tensor& y, int64_t) {
    round_to_format_cpu(format, x, y);
  });
}

void groups_cuda(const Checks& check, const Tensors& input, const Tensor* splits,
                 std::string_view format_name, std::string_view, Tensors& output) {
  round_groups_cuda(format_of(check, format_name), input, splits, output);
}

// Matrices without splits, each converted by `each`.
template <typename Each>
Tensors matrix_by_matrix(const Checks& check, const Tensors& input, at::ScalarType dtype,
                         const Each& each) {
  Tensors parts;
  for (const Tensor& matrix : rounded_groups(check, input, nullptr).matrices) {
    parts.push_back(each(matrix));
  }
  if (parts.empty()) return {input[0].to(dtype, /*non_blocking=*/false, /*copy=*/true)};
  return input[0].dim() == 3 ? Tensors{at::stack(parts)} : parts;
}

Tensors groups_decomposition(const Checks& check, const Tensors& input, const Tensor* splits,
                             std::string_view format_name, std::string_view dtype) {
  const kernel::Format& format = format_of(check, format_name);
  const auto wanted = dtype_named(check, dtype);
  if (splits != nullptr) return {round_groups_decomposed(format, input[0], *splits, wanted)};
  return matrix_by_matrix(check, input, wanted, [&](const Tensor& matrix) {
    return round_to_format_decomposed(format, matrix, wanted);
  });
}

// ---- the same with stochastic rounding, and the Hadamard transform of columns

TensorSpecs stochastic_shape(const Checks& check, const Tensors& input, const Tensor* splits,
                             std::string_view format, std::string_view dtype) {
  random_format(check, format);
  return groups_shape(check, input, splits, format, dtype);
}

void stochastic_cpu(const Checks& check, const Tensors& input, const Tensor* splits,
                    std::string_view format_name, std::string_view, Tensors& output) {
  const kernel::Format& format = random_format(check, format_name);
  const uint64_t seed = draw_seed();
  group_by_group_cpu(check, input, splits, output,
                     [&](const Tensor& x, const Tensor& y, int64_t first_row) {
                       round_at_random_cpu(format, x, seed, first_row, y);
                     });
}

Tensors stochastic_decomposition(const Checks& check, const Tensors& input, const Tensor* splits,
                                 std::string_view format_name, std::string_view dtype) {
  const kernel::Format& format = random_format(check, format_name);
  const auto wanted = dtype_named(check, dtype);
  if (splits != nullptr) {
    return {round_groups_decomposed(format, input[0], *splits, wanted, /*stochastic=*/true)};
  }
  return matrix_by_matrix(check, input, wanted, [&](const Tensor& matrix) {
    return round_at_random_decomposed(format, matrix, wanted);
  });
}

TensorSpecs turned_shape(const Checks& check, const Tensor&, const Tensor& input,
                         const Tensor& splits) {
  check_rounded_groups(check, {input}, &splits);
  TensorSpec spec = like(input);
  spec.dtype = accumulate_dtype(input.scalar_type());
  return {spec};
}

void turned_cpu(const Checks& check, const Tensor&, const Tensor& input, const Tensor& splits,
                Tensor& output) {
  group_by_group_cpu(check, {input}, &splits, {output},
                     [](const Tensor& x, const Tensor& y, int64_t) { turn_columns_cpu(x, y); });
}

Tensor turned_decomposition(const Tensor&, const Tensor& input, const Tensor& splits) {
  return turn_columns_of_groups(input, splits);
}

[[maybe_unused]] const bool registered = [] {
  register_plan_op_for_both_passes(
      {.schema = "quantize_dequantize_groups(Tensor[] input, Tensor? splits, "
                 "str format, str dtype) -> Tensor[] output",
       .shape = groups_shape,
       .bodies = {groups_cpu, groups_cuda, groups_decomposition},
       .differentiable = false,
       .makes = "quantize_dequantize_groups"});
  register_plan_op({.schema = "quantize_dequantize_groups_stochastic(Tensor[] input, "
                              "Tensor? splits, str format, str dtype) -> Tensor[] output",
                    .shape = stochastic_shape,
                    .bodies = {stochastic_cpu, stochastic_decomposition, stochastic_decomposition},
                    .random = true,
                    .differentiable = false});
  register_plan_op({.schema = "hadamard_columns_groups(Tensor grad_output, Tensor input, "
                              "Tensor splits) -> Tensor output",
                    .shape = turned_shape,
                    .bodies = {turned_cpu, turned_decomposition, turned_decomposition},
                    .reads_first = false,
                    .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize_groups
