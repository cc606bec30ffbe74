// Rounding to the numbers of a format:
// - quantize_dequantize rounds to numbers.
// - quantize_values rounds to the values of codes, and returns a scale that decodes them. The
//   values are exact in bfloat16, so a product can take them and multiply its result by the
//   scales. If that scale is the only one, the result may be codes, for devices that multiply
//   codes.
// - quantize_dequantize_groups rounds the operands of grouped products. Each group is a tensor of
//   its own, so no block and no scale spans two groups.
// <op>_stochastic rounds up or down at random. <op>_scaled rounds by a scale of delayed scaling,
// and also returns the largest magnitude.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "kernels/quantize.h"
#include "op/op.h"
#include "quantization/delayed_scaling.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"
#include "wrappers/product.h"

namespace transformer_ops::ops::round {
namespace {

using namespace transformer_ops::delayed_scaling;
using kernel::Format;
using kernel::TensorScale;

// Raises if the format does not support stochastic rounding, as with integers.
void check_format(const Checks& check, std::string_view name, bool at_random) {
  TORCH_CHECK(kernel::is_floating(format_of(check, name).element) || !at_random, "[", check.op(),
              "] format must be floating, got '", name, "'");
}

void check_scale(const Checks& check, const Tensor& scale, const c10::SymDimVector& sizes,
                 int64_t position, std::string_view format) {
  check.spec("scale", scale, {sizes, at::kFloat});
  check_position(check.op(), position);
  TORCH_CHECK(format_of(check, format).per_tensor(), "[", check.op(),
              "] format must have one scale for a tensor, got '", format, "'");
}

std::optional<uint64_t> seed_of(bool at_random) {
  return at_random ? std::optional(draw_seed()) : std::nullopt;
}

// ---- quantize_dequantize, quantize_dequantize_stochastic

auto rounded_shape(bool at_random) {
  return [=](const Checks& check, const Tensor& input, std::string_view format,
             std::string_view dtype) -> TensorSpecs {
    check.compute_dtype("input", input);
    check_format(check, format, at_random);
    return {like(input, dtype_named(check, dtype))};
  };
}

auto rounded_cpu(bool at_random) {
  return [=](const Checks& check, const Tensor& x, std::string_view name, std::string_view,
             Tensor& output) {
    const Format& format = format_of(check, name);
    round_cpu(format, x, tensor_scale_cpu(format, x), output, seed_of(at_random));
  };
}

void rounded_cuda(const Checks& check, const Tensor& x, std::string_view name, std::string_view,
                  Tensor& output) {
  round_cuda(format_of(check, name), x, output);
}

auto rounded_decomposition(bool at_random) {
  return
      [=](const Checks& check, const Tensor& x, std::string_view format, std::string_view dtype) {
        return round_decomposed(format_of(check, format), x, dtype_named(check, dtype), at_random);
      };
}

// ---- quantize_values, quantize_values_stochastic

auto values_shape(bool at_random) {
  return [=](const Checks& check, const Tensor& input, std::string_view name,
             std::string_view dtype) -> TensorSpecs {
    check.compute_dtype("input", input);
    const Format& format = format_of(check, name);
    TORCH_CHECK(format.per_tensor() || format.has_tensor_scale(), "[", check.op(),
                "] format must have a scale of the tensor, got '", name, "'");
    const auto wanted =
        at_random ? dtype_named(check, dtype) : operand_dtype_named(check, format, dtype);
    return {like(input, wanted), {{}, at::kFloat}};
  };
}

auto values_cpu(bool at_random) {
  return [=](const Checks& check, const Tensor& x, std::string_view name, std::string_view,
             Tensor& output, Tensor& scale) {
    const Format& format = format_of(check, name);
    const TensorScale found = tensor_scale_cpu(format, x);
    encode_operand_cpu(format, x, found, output, seed_of(at_random));
    *scale.mutable_data_ptr<float>() = found.decode;
  };
}

void values_cuda(const Checks& check, const Tensor& x, std::string_view format, std::string_view,
                 Tensor& output, Tensor& scale) {
  round_cuda(format_of(check, format), x, output, scale);
}

auto values_decomposition(bool at_random) {
  return [=](const Checks& check, const Tensor& x, std::string_view name, std::string_view dtype) {
    const Format& format = format_of(check, name);
    return values_decomposed(format, x, operand_dtype_named(check, format, dtype), at_random);
  };
}

// ---- quantize_dequantize_scaled, quantize_values_scaled

TensorSpecs scaled_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                         int64_t position, std::string_view format, std::string_view dtype) {
  check.compute_dtype("input", input);
  check_scale(check, scale, {kPositions}, position, format);
  return {like(input, dtype_named(check, dtype)), {{}, at::kFloat}};
}

// The largest magnitude goes to `amax`, unless that is null. Rounding may be in place, so each part
// is read before it is rounded.
void round_by_scale(const Format& format, const Tensor& x, const TensorScale& scale,
                    const Tensor& output, float* amax) {
  constexpr int64_t kPart = 4096;  // stays in the first cache
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  if (amax != nullptr) *amax = 0;
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kPart) {
      const int64_t n = std::min(kPart, end - i);
      const char* const part = element_at(x, i);
      if (amax != nullptr) take_larger(std::atomic_ref(*amax), cpu::largest(from, part, n));
      cpu::round_to_format(format, from, to, part, scale, element_at(output, i), 1, n);
    }
  });
}

// Null if the result is not wanted, as in backward.
float* data_of(const Tensor& amax) {
  return amax.defined() ? amax.mutable_data_ptr<float>() : nullptr;
}

void scaled_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                std::string_view format, std::string_view, Tensor& output, Tensor& amax) {
  const float encodes = scale.const_data_ptr<float>()[position];
  round_by_scale(format_of(check, format), x, {encodes, 1.0f / encodes}, output, data_of(amax));
}

std::tuple<Tensor, Tensor> scaled_decomposition(const Checks& check, const Tensor& x,
                                                const Tensor& scale, int64_t position,
                                                std::string_view format, std::string_view dtype) {
  return round_by_scale_decomposed(format_of(check, format), x, scale.select(0, position),
                                   dtype_named(check, dtype));
}

TensorSpecs values_scaled_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                                int64_t position, std::string_view format, std::string_view dtype) {
  TensorSpecs specs = scaled_shape(check, input, scale, position, format, "float32");
  specs[0].dtype = operand_dtype_named(check, format_of(check, format), dtype);
  return {specs[0], {{}, at::kFloat}, specs[1]};
}

void values_scaled_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                       std::string_view name, std::string_view, Tensor& output, Tensor& decodes,
                       Tensor& amax) {
  const Format& format = format_of(check, name);
  const float encodes = scale.const_data_ptr<float>()[position];
  if (is_codes(output.scalar_type())) {
    encode_operand_cpu(format, x, {encodes}, output);
    if (amax.defined()) *amax.mutable_data_ptr<float>() = largest_cpu(x);
  } else {
    round_by_scale(format, x, {encodes, /*decode=*/1.0f}, output, data_of(amax));
  }
  *decodes.mutable_data_ptr<float>() = 1.0f / encodes;
}

void values_scaled_cuda(const Checks& check, const Tensor& x, const Tensor& scale, int64_t position,
                        std::string_view format, std::string_view, Tensor& output, Tensor& decodes,
                        Tensor& amax) {
  round_cuda(format_of(check, format), x, output, decodes,
             scale.const_data_ptr<float>() + position);
  if (amax.defined()) amax.copy_(largest_cuda(x)[0]);
}

std::tuple<Tensor, Tensor, Tensor> values_scaled_decomposition(const Checks& check, const Tensor& x,
                                                               const Tensor& scale,
                                                               int64_t position,
                                                               std::string_view name,
                                                               std::string_view dtype) {
  const Tensor encodes = scale.select(0, position);
  const Format& format = format_of(check, name);
  const auto [output, amax] = round_by_scale_decomposed(
      format, x, encodes, operand_dtype_named(check, format, dtype), /*decodes=*/false);
  return {output, encodes.reciprocal(), amax};
}

// ---- quantize_dequantize_groups, quantize_dequantize_groups_stochastic

TensorSpec groups_spec(const Checks& check, const Tensors& input, const Tensor* splits,
                       std::string_view dtype) {
  check_rounded_groups(check, input, splits);
  TensorSpec specs = like(input);
  for (TensorSpec& spec : *specs.list) spec.dtype = dtype_named(check, dtype);
  return specs;
}

auto groups_shape(bool at_random) {
  return [=](const Checks& check, const Tensors& input, const Tensor* splits,
             std::string_view format, std::string_view dtype) -> TensorSpecs {
    check_format(check, format, at_random);
    return {groups_spec(check, input, splits, dtype)};
  };
}

auto groups_cpu(bool at_random) {
  return [=](const Checks& check, const Tensors& input, const Tensor* splits, std::string_view name,
             std::string_view, Tensors& output) {
    const Format& format = format_of(check, name);
    const auto seed = seed_of(at_random);
    group_by_group_cpu(check, input, splits, output,
                       [&](const Tensor& x, const Tensor& y, size_t, int64_t first_row) {
                         round_cpu(format, x, tensor_scale_cpu(format, x), y, seed, first_row);
                       });
  };
}

void groups_cuda(const Checks& check, const Tensors& input, const Tensor* splits,
                 std::string_view format, std::string_view, Tensors& output) {
  round_groups_cuda(format_of(check, format), input, splits, output);
}

// Matrices without splits, each rounded by `round`.
template <typename Round>
Tensors matrix_by_matrix(const Checks& check, const Tensors& input, at::ScalarType dtype,
                         const Round& round) {
  Tensors parts;
  for (const Tensor& matrix : rounded_groups(check, input, nullptr).matrices) {
    parts.push_back(round(matrix));
  }
  if (parts.empty()) return {input[0].to(dtype, /*non_blocking=*/false, /*copy=*/true)};
  return input[0].dim() == 3 ? Tensors{at::stack(parts)} : parts;
}

auto groups_decomposition(bool at_random) {
  return [=](const Checks& check, const Tensors& input, const Tensor* splits, std::string_view name,
             std::string_view dtype) -> Tensors {
    const Format& format = format_of(check, name);
    const auto wanted = dtype_named(check, dtype);
    if (splits != nullptr) {
      return {round_groups_decomposed(format, input[0], *splits, wanted, at_random)};
    }
    return matrix_by_matrix(check, input, wanted, [&](const Tensor& matrix) {
      return round_decomposed(format, matrix, wanted, at_random);
    });
  };
}

// ---- quantize_dequantize_groups_scaled, with a scale for each group

TensorSpecs groups_scaled_shape(const Checks& check, const Tensors& input, const Tensor& scale,
                                int64_t position, const Tensor* splits, std::string_view format,
                                std::string_view dtype) {
  const TensorSpec output = groups_spec(check, input, splits, dtype);
  const c10::SymInt groups = count_rounded_groups(input, splits);
  check_scale(check, scale, {kPositions, groups}, position, format);
  return {output, {{groups}, at::kFloat}};
}

void groups_scaled_cpu(const Checks& check, const Tensors& input, const Tensor& scale,
                       int64_t position, const Tensor* splits, std::string_view name,
                       std::string_view, Tensors& output, Tensor& amax) {
  const Format& format = format_of(check, name);
  const float* const scales = scale.const_data_ptr<float>() + position * scale.size(1);
  float* const amaxes = data_of(amax);
  if (amaxes != nullptr) std::fill_n(amaxes, amax.numel(), kNothing);
  group_by_group_cpu(
      check, input, splits, output, [&](const Tensor& x, const Tensor& y, size_t group, int64_t) {
        const TensorScale by{scales[group], 1.0f / scales[group]};
        round_by_scale(format, x, by, y, amaxes == nullptr ? amaxes : amaxes + group);
      });
}

void groups_scaled_cuda(const Checks& check, const Tensors& input, const Tensor& scale,
                        int64_t position, const Tensor* splits, std::string_view format,
                        std::string_view, Tensors& output, Tensor& amax) {
  round_groups_cuda(format_of(check, format), input, splits, output, scale.select(0, position));
  if (amax.defined()) largest_of_groups_cuda(input, splits, kNothing, amax);
}

std::tuple<Tensors, Tensor> groups_scaled_decomposition(const Checks& check, const Tensors& input,
                                                        const Tensor& scale, int64_t position,
                                                        const Tensor* splits, std::string_view name,
                                                        std::string_view dtype) {
  const Format& format = format_of(check, name);
  const auto wanted = dtype_named(check, dtype);
  const Tensor scales = scale.select(0, position);
  if (splits != nullptr) {
    const auto [output, amax] =
        round_groups_by_scale_decomposed(format, input[0], scales, *splits, wanted, kNothing);
    return {Tensors{output}, amax};
  }
  Tensors amaxes = {at::empty({0}, scales.options())};
  Tensors output = matrix_by_matrix(check, input, wanted, [&](const Tensor& matrix) {
    const auto [rounded, amax] =
        round_by_scale_decomposed(format, matrix, scales.select(0, std::ssize(amaxes) - 1), wanted);
    amaxes.push_back(matrix.sym_size(0) > 0 ? amax.reshape({1})
                                            : at::full({1}, kNothing, amax.options()));
    return rounded;
  });
  return {std::move(output), at::cat(amaxes)};
}

void register_rounding(bool at_random) {
  const std::string suffix = at_random ? "_stochastic" : "";
  const auto rounded = rounded_decomposition(at_random);
  register_typed_op(
      {.schema = "quantize_dequantize" + suffix +
                 "(Tensor input, str format, str dtype) -> Tensor output",
       .shape = rounded_shape(at_random),
       .bodies = {rounded_cpu(at_random), at_random ? Body(rounded) : Body(rounded_cuda), rounded},
       .random = at_random,
       .differentiable = false,
       .is_shared = !at_random});
  const auto values = values_decomposition(at_random);
  (at_random ? register_plan_op : register_typed_op)(
      {.schema = "quantize_values" + suffix +
                 "(Tensor input, str format, str dtype) -> (Tensor output, Tensor scale)",
       .shape = values_shape(at_random),
       .bodies = {values_cpu(at_random), at_random ? Body(values) : Body(values_cuda), values},
       .random = at_random,
       .differentiable = false,
       .is_shared = !at_random});
  const auto groups = groups_decomposition(at_random);
  register_plan_op(
      {.schema = "quantize_dequantize_groups" + suffix +
                 "(Tensor[] input, Tensor? splits, str format, str dtype) -> "
                 "Tensor[] output",
       .shape = groups_shape(at_random),
       .bodies = {groups_cpu(at_random), at_random ? Body(groups) : Body(groups_cuda), groups},
       .random = at_random,
       .differentiable = false,
       .is_shared = !at_random});
}

[[maybe_unused]] const bool registered = [] {
  for (const bool at_random : {false, true}) register_rounding(at_random);
  register_typed_op({.schema = "quantize_dequantize_scaled(Tensor input, Tensor scale, "
                               "int position, str format, str dtype) -> "
                               "(Tensor output, Tensor amax)",
                     .shape = scaled_shape,
                     .bodies = {scaled_cpu, scaled_decomposition, scaled_decomposition},
                     .differentiable = false,
                     .last_in_forward = true,
                     .is_shared = true});
  register_plan_op({.schema = "quantize_values_scaled(Tensor input, Tensor scale, int position, "
                              "str format, str dtype) -> "
                              "(Tensor output, Tensor decodes, Tensor amax)",
                    .shape = values_scaled_shape,
                    .bodies = {values_scaled_cpu, values_scaled_cuda, values_scaled_decomposition},
                    .differentiable = false,
                    .last_in_forward = true,
                    .is_shared = true});
  register_plan_op({.schema = "quantize_dequantize_groups_scaled(Tensor[] input, Tensor scale, "
                              "int position, Tensor? splits, str format, str dtype) -> "
                              "(Tensor[] output, Tensor amax)",
                    .shape = groups_scaled_shape,
                    .bodies = {groups_scaled_cpu, groups_scaled_cuda, groups_scaled_decomposition},
                    .differentiable = false,
                    .last_in_forward = true,
                    .is_shared = true});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::round
