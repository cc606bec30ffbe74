// Quantized tensors as the values of their codes and a separate scale, in formats with a scale of
// the whole tensor. The values are exact in bfloat16, so a product can use them and multiply its
// result by the scales. If that scale is the only one, the result may be codes, for devices that
// multiply codes.
#include "op/op.h"
#include "op/recompute.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cpu.h"
#include "wrappers/dropout.h"

namespace transformer_ops::ops::quantize_values {
namespace {

using kernel::Format;

const Format& format_with_scale(const Checks& check, std::string_view name) {
  const Format& format = format_of(check, name);
  TORCH_CHECK(format.per_tensor() || format.has_tensor_scale(), "[", check.op(),
              "] format must have a scale of the tensor, got '", name, "'");
  return format;
}

TensorSpecs values_shape(const Checks& check, const Tensor& input, std::string_view format,
                         std::string_view dtype) {
  check.compute_dtype("input", input);
  TensorSpec spec = like(input);
  spec.dtype = operand_dtype_named(check, format_with_scale(check, format), dtype);
  return {spec, {{}, at::kFloat}};
}

void values_cpu(const Checks& check, const Tensor& x, std::string_view format_name,
                std::string_view, Tensor& output, Tensor& scale) {
  const Format& format = format_with_scale(check, format_name);
  const kernel::TensorScale found = tensor_scale_cpu(format, x);
  encode_operand_cpu(format, x, found, output);
  *scale.mutable_data_ptr<float>() = found.decode;
}

void values_cuda(const Checks& check, const Tensor& x, std::string_view format, std::string_view,
                 Tensor& output, Tensor& scale) {
  encode_operand_cuda(format_with_scale(check, format), x, output, scale);
}

std::tuple<Tensor, Tensor> values_decomposition(const Checks& check, const Tensor& x,
                                                std::string_view format, std::string_view dtype) {
  const Format& row = format_with_scale(check, format);
  return values_decomposed(row, x, operand_dtype_named(check, row, dtype));
}

// ---- values only, rounded up or down at random

TensorSpecs stochastic_shape(const Checks& check, const Tensor& input, std::string_view format,
                             std::string_view dtype) {
  check.compute_dtype("input", input);
  format_with_scale(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec, {{}, at::kFloat}};
}

void stochastic_cpu(const Checks& check, const Tensor& x, std::string_view format_name,
                    std::string_view, Tensor& output, Tensor& scale) {
  const Format& format = format_with_scale(check, format_name);
  const kernel::TensorScale found = tensor_scale_cpu(format, x);
  round_at_random_cpu(format, x, not_decoded(found), draw_seed(), /*first_row=*/0, output);
  *scale.mutable_data_ptr<float>() = found.decode;
}

std::tuple<Tensor, Tensor> stochastic_decomposition(const Checks& check, const Tensor& x,
                                                    std::string_view format,
                                                    std::string_view dtype) {
  return values_decomposed(format_with_scale(check, format), x, dtype_named(check, dtype),
                           /*stochastic=*/true);
}

[[maybe_unused]] const bool registered = [] {
  register_for_both_passes({.schema = "quantize_values(Tensor input, str format, str dtype) -> "
                                      "(Tensor output, Tensor scale)",
                            .shape = values_shape,
                            .bodies = {values_cpu, values_cuda, values_decomposition},
                            .differentiable = false,
                            .makes = "quantize_values"});
  register_plan_op({.schema = "quantize_values_stochastic(Tensor input, str format, "
                              "str dtype) -> (Tensor output, Tensor scale)",
                    .shape = stochastic_shape,
                    .bodies = {stochastic_cpu, stochastic_decomposition, stochastic_decomposition},
                    .random = true,
                    .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize_values
