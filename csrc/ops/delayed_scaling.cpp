// Rounding by the scales of delayed scaling.
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "bodies/cpu.h"
#include "bodies/delayed_scaling.h"
#include "bodies/grouped.h"
#include "bodies/linear.h"
#include "bodies/product.h"
#include "bodies/quantized_cuda.h"
#include "bodies/rounding.h"
#include "kernels/quantize.h"
#include "op/op.h"

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
                         int64_t place, std::string_view format, std::string_view dtype) {
  check.compute_dtype("input", input);
  check.spec("scale", scale, {{kPlaces}, at::kFloat});
  check_place(check.op(), place);
  scaled_format(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec, {{}, at::kFloat}};
}

// What codes stand for is multiplied by `decodes`; `record` is called with each part.
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
      cpu::round_to_format(format, from, to, bytes_at(x, i * size), scale, decodes,
                           bytes_at(output, i * output_size), 1, n);
      record(from, bytes_at(x, i * size), n);
    }
  });
}

// The largest magnitude into `amax`.
void round_and_note(const kernel::Format& format, const Tensor& x, float scale, float decodes,
                    const Tensor& output, const Tensor& amax) {
  auto& best = *amax.mutable_data_ptr<float>();
  best = 0;
  round_by_scale(format, x, scale, decodes, output, [&](auto dtype, const void* part, int64_t n) {
    take_larger(std::atomic_ref(best), cpu::largest(dtype, part, n));
  });
}

void scaled_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t place,
                std::string_view format, std::string_view, Tensor& output, Tensor& amax) {
  const float encodes = scale.const_data_ptr<float>()[place];
  round_and_note(scaled_format(check, format), x, encodes, 1.0f / encodes, output, amax);
}

std::tuple<Tensor, Tensor> scaled_meaning(const Checks& check, const Tensor& x, const Tensor& scale,
                                          int64_t place, std::string_view format,
                                          std::string_view dtype) {
  return round_by_scale_unfused(scaled_format(check, format), x, scale.select(0, place),
                                dtype_named(check, dtype));
}

// ---- the same in backward, of what forward rounded: behind a gradient, which keeps a compiler
// from doing it in forward

TensorSpecs saved_shape(const Checks& check, const Tensor&, const Tensor& input,
                        const Tensor& scale, int64_t place, std::string_view format,
                        std::string_view dtype) {
  return {scaled_shape(check, input, scale, place, format, dtype)[0]};
}

void saved_cpu(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
               int64_t place, std::string_view format, std::string_view, Tensor& output) {
  const float encodes = scale.const_data_ptr<float>()[place];
  round_by_scale(scaled_format(check, format), x, encodes, 1.0f / encodes, output,
                 [](auto, const void*, int64_t) {});
}

Tensor saved_meaning(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
                     int64_t place, std::string_view format, std::string_view dtype) {
  return std::get<0>(scaled_meaning(check, x, scale, place, format, dtype));
}

// ---- quantize_values_scaled: as quantize_values, by such a scale

TensorSpecs values_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                         int64_t place, std::string_view format, std::string_view dtype) {
  TensorSpecs specs = scaled_shape(check, input, scale, place, format, "float32");
  specs[0].dtype = operand_dtype_named(check, scaled_format(check, format), dtype);
  return {specs[0], {{}, at::kFloat}, specs[1]};
}

void values_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t place,
                std::string_view format, std::string_view, Tensor& output, Tensor& decodes,
                Tensor& amax) {
  const kernel::Format& row = scaled_format(check, format);
  const float encodes = scale.const_data_ptr<float>()[place];
  if (is_codes(output.scalar_type())) {
    encode_operand_cpu(row, x, encodes, output);
    *amax.mutable_data_ptr<float>() = largest_cpu(x);
  } else {
    round_and_note(row, x, encodes, /*decodes=*/1.0f, output, amax);
  }
  *decodes.mutable_data_ptr<float>() = 1.0f / encodes;
}

void values_cuda(const Checks& check, const Tensor& x, const Tensor& scale, int64_t place,
                 std::string_view format, std::string_view, Tensor& output, Tensor& decodes,
                 Tensor& amax) {
  encode_operand_cuda(scaled_format(check, format), x, output, decodes,
                      scale.const_data_ptr<float>() + place);
  amax.copy_(largest_cuda(x)[0]);
}

std::tuple<Tensor, Tensor, Tensor> values_meaning(const Checks& check, const Tensor& x,
                                                  const Tensor& scale, int64_t place,
                                                  std::string_view format, std::string_view dtype) {
  const Tensor encodes = scale.select(0, place);
  const kernel::Format& row = scaled_format(check, format);
  const auto [output, amax] = round_by_scale_unfused(
      row, x, encodes, operand_dtype_named(check, row, dtype), /*decodes=*/false);
  return {output, encodes.reciprocal(), amax};
}

TensorSpecs values_saved_shape(const Checks& check, const Tensor&, const Tensor& input,
                               const Tensor& scale, int64_t place, std::string_view format,
                               std::string_view dtype) {
  const TensorSpecs specs = values_shape(check, input, scale, place, format, dtype);
  return {specs[0], specs[1]};
}

void values_saved_cpu(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
                      int64_t place, std::string_view format, std::string_view, Tensor& output,
                      Tensor& decodes) {
  const float encodes = scale.const_data_ptr<float>()[place];
  encode_operand_cpu(scaled_format(check, format), x, encodes, output);
  *decodes.mutable_data_ptr<float>() = 1.0f / encodes;
}

void values_saved_cuda(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
                       int64_t place, std::string_view format, std::string_view, Tensor& output,
                       Tensor& decodes) {
  encode_operand_cuda(scaled_format(check, format), x, output, decodes,
                      scale.const_data_ptr<float>() + place);
}

std::tuple<Tensor, Tensor> values_saved_meaning(const Checks& check, const Tensor&, const Tensor& x,
                                                const Tensor& scale, int64_t place,
                                                std::string_view format, std::string_view dtype) {
  const auto [output, decodes, amax] = values_meaning(check, x, scale, place, format, dtype);
  return {output, decodes};
}

// ---- the same group by group, each with a scale of its own: of the operands of grouped products

TensorSpecs groups_shape(const Checks& check, const Tensors& input, const Tensor& scale,
                         int64_t place, const Tensor* splits, std::string_view format,
                         std::string_view dtype) {
  check_rounded_groups(check, input, splits);
  const c10::SymInt groups = count_rounded_groups(input, splits);
  check.spec("scale", scale, {{kPlaces, groups}, at::kFloat});
  check_place(check.op(), place);
  scaled_format(check, format);
  TensorSpec specs = like(input);
  for (TensorSpec& spec : *specs.list) spec.dtype = dtype_named(check, dtype);
  return {specs, {{groups}, at::kFloat}};
}

void groups_cpu(const Checks& check, const Tensors& input, const Tensor& scale, int64_t place,
                const Tensor* splits, std::string_view format_name, std::string_view,
                Tensors& output, Tensor& amax) {
  const kernel::Format& format = scaled_format(check, format_name);
  const RoundedGroups x = rounded_groups(check, input, splits);
  const RoundedGroups y = rounded_groups(check, output, splits);
  const float* const scales = scale.const_data_ptr<float>() + place * std::ssize(x.matrices);
  auto* const found = amax.mutable_data_ptr<float>();
  for (size_t group = 0; group < x.matrices.size(); ++group) {
    const bool is_empty = x.matrices[group].size(0) == 0;
    found[group] = is_empty ? kNothing : 0.0f;
    if (is_empty) continue;
    round_by_scale(format, x.matrices[group], scales[group], 1.0f / scales[group],
                   y.matrices[group], [&](auto dtype, const void* part, int64_t n) {
                     take_larger(std::atomic_ref(found[group]), cpu::largest(dtype, part, n));
                   });
  }
  if (y.rest.defined()) y.rest.zero_();
}

std::tuple<Tensors, Tensor> groups_meaning(const Checks& check, const Tensors& input,
                                           const Tensor& scale, int64_t place, const Tensor* splits,
                                           std::string_view format, std::string_view dtype) {
  const auto [matrices, rest] = rounded_groups(check, input, splits);
  const auto wanted = dtype_named(check, dtype);
  const Tensor scales = scale.select(0, place);
  Tensors parts, amaxes;
  for (size_t group = 0; group < matrices.size(); ++group) {
    const auto [part, amax] =
        round_by_scale_unfused(scaled_format(check, format), matrices[group],
                               scales.select(0, static_cast<int64_t>(group)), wanted);
    parts.push_back(part);
    amaxes.push_back(matrices[group].size(0) > 0 ? amax : at::full_like(amax, kNothing));
  }
  const Tensor amax = at::stack(amaxes).to(at::kFloat);
  if (input.size() > 1) return {parts, amax};
  if (rest.defined()) parts.push_back(at::zeros(rest.sizes(), rest.options().dtype(wanted)));
  const Tensor output = rest.defined() ? at::cat(parts) : at::stack(parts);
  return {Tensors{output.view(input[0].sizes())}, amax};
}

TensorSpecs groups_saved_shape(const Checks& check, const Tensor&, const Tensors& input,
                               const Tensor& scale, int64_t place, const Tensor* splits,
                               std::string_view format, std::string_view dtype) {
  return {groups_shape(check, input, scale, place, splits, format, dtype)[0]};
}

void groups_saved_cpu(const Checks& check, const Tensor&, const Tensors& input, const Tensor& scale,
                      int64_t place, const Tensor* splits, std::string_view format,
                      std::string_view dtype, Tensors& output) {
  Tensor amax = empty({scale.size(1)}, at::kFloat, at::kCPU);
  groups_cpu(check, input, scale, place, splits, format, dtype, output, amax);
}

Tensors groups_saved_meaning(const Checks& check, const Tensor&, const Tensors& input,
                             const Tensor& scale, int64_t place, const Tensor* splits,
                             std::string_view format, std::string_view dtype) {
  return std::get<0>(groups_meaning(check, input, scale, place, splits, format, dtype));
}

[[maybe_unused]] const bool registered = [] {
  register_typed_op({.schema = "quantize_dequantize_scaled(Tensor input, Tensor scale, int place, "
                               "str format, str dtype) -> (Tensor output, Tensor amax)",
                     .shape = scaled_shape,
                     .bodies = {scaled_cpu, scaled_meaning, scaled_meaning},
                     .differentiable = false,
                     .makes = "quantize_dequantize_scaled"});
  register_typed_op({.schema = "quantize_dequantize_scaled_saved(Tensor grad_output, Tensor input, "
                               "Tensor scale, int place, str format, str dtype) -> Tensor output",
                     .shape = saved_shape,
                     .bodies = {saved_cpu, saved_meaning, saved_meaning},
                     .reads_first = false,
                     .differentiable = false,
                     .makes = "quantize_dequantize_scaled"});
  register_typed_op({.schema = "quantize_values_scaled(Tensor input, Tensor scale, int place, "
                               "str format, str dtype) -> (Tensor output, Tensor decodes, "
                               "Tensor amax)",
                     .shape = values_shape,
                     .bodies = {values_cpu, values_cuda, values_meaning},
                     .differentiable = false,
                     .makes = "quantize_values_scaled"});
  register_typed_op({.schema = "quantize_values_scaled_saved(Tensor grad_output, Tensor input, "
                               "Tensor scale, int place, str format, str dtype) -> "
                               "(Tensor output, Tensor decodes)",
                     .shape = values_saved_shape,
                     .bodies = {values_saved_cpu, values_saved_cuda, values_saved_meaning},
                     .reads_first = false,
                     .differentiable = false,
                     .makes = "quantize_values_scaled"});
  register_typed_op({.schema = "quantize_dequantize_groups_scaled(Tensor[] input, Tensor scale, "
                               "int place, Tensor? splits, str format, str dtype) -> "
                               "(Tensor[] output, Tensor amax)",
                     .shape = groups_shape,
                     .bodies = {groups_cpu, groups_meaning, groups_meaning},
                     .differentiable = false,
                     .makes = "quantize_dequantize_groups_scaled"});
  register_typed_op({.schema = "quantize_dequantize_groups_scaled_saved(Tensor grad_output, "
                               "Tensor[] input, Tensor scale, int place, Tensor? splits, "
                               "str format, str dtype) -> Tensor[] output",
                     .shape = groups_saved_shape,
                     .bodies = {groups_saved_cpu, groups_saved_meaning, groups_saved_meaning},
                     .reads_first = false,
                     .differentiable = false,
                     .makes = "quantize_dequantize_groups_scaled"});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::delayed_scaling
