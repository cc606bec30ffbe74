// Rounding by the scales of delayed scaling.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "kernels/quantize.h"
#include "op/op.h"
#include "op/recompute.h"
#include "quantization/delayed_scaling.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cpu.h"
#include "wrappers/grouped.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops::ops::delayed_scaling {
namespace {

using namespace transformer_ops::delayed_scaling;

const kernel::Format& scaled_format(const Checks& check, std::string_view name) {
  const kernel::Format& format = format_of(check, name);
  TORCH_CHECK(format.per_tensor(), "[", check.op(), "] format must have one scale for a tensor, ",
              "got '", name, "'");
  return format;
}

// ---- quantize_dequantize_scaled: the rounded tensor, and its largest magnitude

TensorSpecs scaled_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                         int64_t position, std::string_view format, std::string_view dtype) {
  check.compute_dtype("input", input);
  check.spec("scale", scale, {{kPositions}, at::kFloat});
  check_position(check.op(), position);
  scaled_format(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec, {{}, at::kFloat}};
}

// The values of codes are multiplied by `decodes`. `record` is called with each part before it is
// rounded, because rounding may be in place.
template <typename Record>
void round_by_scale(const kernel::Format& format, const Tensor& x, float scale, float decodes,
                    const Tensor& output, const Record& record) {
  constexpr int64_t kPiece = 4096;  // stays in the first cache
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto size = static_cast<int64_t>(x.element_size());
  const auto output_size = static_cast<int64_t>(output.element_size());
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kPiece) {
      const int64_t n = std::min(kPiece, end - i);
      record(from, bytes_at(x, i * size), n);
      cpu::round_to_format(format, from, to, bytes_at(x, i * size), {scale, decodes},
                           bytes_at(output, i * output_size), 1, n);
    }
  });
}

// Null if the result is not wanted, as in backward.
float* data_of(const Tensor& amax) {
  return amax.defined() ? amax.mutable_data_ptr<float>() : nullptr;
}

// Writes the largest magnitude to `amax`, unless that is null.
void round_and_note(const kernel::Format& format, const Tensor& x, float scale, float decodes,
                    const Tensor& output, float* amax) {
  if (amax != nullptr) *amax = 0;
  round_by_scale(format, x, scale, decodes, output, [&](auto dtype, const void* part, int64_t n) {
    if (amax != nullptr) take_larger(std::atomic_ref(*amax), cpu::largest(dtype, part, n));
  });
}

void scaled_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                std::string_view format, std::string_view, Tensor& output, Tensor& amax) {
  const float encodes = scale.const_data_ptr<float>()[position];
  round_and_note(scaled_format(check, format), x, encodes, 1.0f / encodes, output, data_of(amax));
}

std::tuple<Tensor, Tensor> scaled_decomposition(const Checks& check, const Tensor& x,
                                                const Tensor& scale, int64_t position,
                                                std::string_view format, std::string_view dtype) {
  return round_by_scale_decomposed(scaled_format(check, format), x, scale.select(0, position),
                                   dtype_named(check, dtype));
}

// ---- quantize_values_scaled: the same as quantize_values, by such a scale

TensorSpecs values_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                         int64_t position, std::string_view format, std::string_view dtype) {
  TensorSpecs specs = scaled_shape(check, input, scale, position, format, "float32");
  specs[0].dtype = operand_dtype_named(check, scaled_format(check, format), dtype);
  return {specs[0], {{}, at::kFloat}, specs[1]};
}

void values_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                std::string_view format, std::string_view, Tensor& output, Tensor& decodes,
                Tensor& amax) {
  const kernel::Format& row = scaled_format(check, format);
  const float encodes = scale.const_data_ptr<float>()[position];
  if (is_codes(output.scalar_type())) {
    encode_operand_cpu(row, x, {encodes}, output);
    if (amax.defined()) *amax.mutable_data_ptr<float>() = largest_cpu(x);
  } else {
    round_and_note(row, x, encodes, /*decodes=*/1.0f, output, data_of(amax));
  }
  *decodes.mutable_data_ptr<float>() = 1.0f / encodes;
}

void values_cuda(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                 std::string_view format, std::string_view, Tensor& output, Tensor& decodes,
                 Tensor& amax) {
  encode_operand_cuda(scaled_format(check, format), x, output, decodes,
                      scale.const_data_ptr<float>() + position);
  if (amax.defined()) amax.copy_(largest_cuda(x)[0]);
}

std::tuple<Tensor, Tensor, Tensor> values_decomposition(const Checks& check, const Tensor& x,
                                                        const Tensor& scale, int64_t position,
                                                        std::string_view format,
                                                        std::string_view dtype) {
  const Tensor encodes = scale.select(0, position);
  const kernel::Format& row = scaled_format(check, format);
  const auto [output, amax] = round_by_scale_decomposed(
      row, x, encodes, operand_dtype_named(check, row, dtype), /*decodes=*/false);
  return {output, encodes.reciprocal(), amax};
}

// ---- the same group by group, each with its own scale, for the operands of grouped products

TensorSpecs groups_shape(const Checks& check, const Tensors& input, const Tensor& scale,
                         int64_t position, const Tensor* splits, std::string_view format,
                         std::string_view dtype) {
  check_rounded_groups(check, input, splits);
  const c10::SymInt groups = count_rounded_groups(input, splits);
  check.spec("scale", scale, {{kPositions, groups}, at::kFloat});
  check_position(check.op(), position);
  scaled_format(check, format);
  TensorSpec specs = like(input);
  for (TensorSpec& spec : *specs.list) spec.dtype = dtype_named(check, dtype);
  return {specs, {{groups}, at::kFloat}};
}

void groups_cpu(const Checks& check, const Tensors& input, const Tensor& scale, int64_t position,
                const Tensor* splits, std::string_view format_name, std::string_view,
                Tensors& output, Tensor& amax) {
  const kernel::Format& format = scaled_format(check, format_name);
  const RoundedGroups x = rounded_groups(check, input, splits);
  const RoundedGroups y = rounded_groups(check, output, splits);
  const float* const scales = scale.const_data_ptr<float>() + position * std::ssize(x.matrices);
  float* const amaxes = data_of(amax);
  for (size_t group = 0; group < x.matrices.size(); ++group) {
    float* const found = amaxes == nullptr ? nullptr : amaxes + group;
    if (x.matrices[group].size(0) > 0) {
      round_and_note(format, x.matrices[group], scales[group], 1.0f / scales[group],
                     y.matrices[group], found);
    } else if (found != nullptr) {
      *found = kNothing;
    }
  }
  if (y.rest.defined()) y.rest.zero_();
}

void groups_cuda(const Checks& check, const Tensors& input, const Tensor& scale, int64_t position,
                 const Tensor* splits, std::string_view format, std::string_view, Tensors& output,
                 Tensor& amax) {
  round_groups_cuda(scaled_format(check, format), input, splits, output, scale.select(0, position));
  if (amax.defined()) largest_of_groups_cuda(input, splits, kNothing, amax);
}

std::tuple<Tensors, Tensor> groups_decomposition(const Checks& check, const Tensors& input,
                                                 const Tensor& scale, int64_t position,
                                                 const Tensor* splits, std::string_view format_name,
                                                 std::string_view dtype) {
  const kernel::Format& format = scaled_format(check, format_name);
  const auto wanted = dtype_named(check, dtype);
  const Tensor scales = scale.select(0, position);
  if (splits != nullptr) {
    const auto [output, amax] =
        round_groups_by_scale_decomposed(format, input[0], scales, *splits, wanted, kNothing);
    return {Tensors{output}, amax};
  }
  Tensors parts, amaxes = {at::empty({0}, scales.options())};
  for (const Tensor& matrix : rounded_groups(check, input, nullptr).matrices) {
    const auto group = static_cast<int64_t>(parts.size());
    const auto [part, amax] =
        round_by_scale_decomposed(format, matrix, scales.select(0, group), wanted);
    parts.push_back(part);
    amaxes.push_back(matrix.sym_size(0) > 0 ? amax.reshape({1})
                                            : at::full({1}, kNothing, amax.options()));
  }
  const Tensor amax = at::cat(amaxes);
  if (parts.empty()) {
    return {Tensors{input[0].to(wanted, /*non_blocking=*/false, /*copy=*/true)}, amax};
  }
  return {input[0].dim() == 3 ? Tensors{at::stack(parts)} : parts, amax};
}

[[maybe_unused]] const bool registered = [] {
  register_for_both_passes(
      {.schema = "quantize_dequantize_scaled(Tensor input, Tensor scale, int position, str format, "
                 "str dtype) -> (Tensor output, Tensor amax)",
       .shape = scaled_shape,
       .bodies = {scaled_cpu, scaled_decomposition, scaled_decomposition},
       .differentiable = false,
       .makes = "quantize_dequantize_scaled"},
      LastResult::InForward);
  register_plan_op_for_both_passes(
      {.schema = "quantize_values_scaled(Tensor input, Tensor scale, int position, str format, "
                 "str dtype) -> (Tensor output, Tensor decodes, Tensor amax)",
       .shape = values_shape,
       .bodies = {values_cpu, values_cuda, values_decomposition},
       .differentiable = false,
       .makes = "quantize_values_scaled"},
      LastResult::InForward);
  register_plan_op_for_both_passes(
      {.schema = "quantize_dequantize_groups_scaled(Tensor[] input, Tensor scale, int position, "
                 "Tensor? splits, str format, str dtype) -> (Tensor[] output, Tensor amax)",
       .shape = groups_shape,
       .bodies = {groups_cpu, groups_cuda, groups_decomposition},
       .differentiable = false,
       .makes = "quantize_dequantize_groups_scaled"},
      LastResult::InForward);
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::delayed_scaling
