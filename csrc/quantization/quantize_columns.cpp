// NVFP4 rounding for products, besides quantize: for operands that are summed over their rows, and
// for gradients that are rounded up or down at random.
//
// Two 4-bit codes share a byte, and a product needs them to follow each other along the sum.
// Operands that are summed over their rows have codes of two rows in a byte, and so half as many
// rows.
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>

#include "op/op.h"
#include "op/recompute.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops::ops::quantize_columns {
namespace {

using kernel::Element;
using kernel::Format;

c10::SymInt row_count(const Tensor& tensor) {
  c10::SymInt rows = 1;
  for (const auto& size : tensor.sym_sizes().slice(0, tensor.dim() - 1)) rows = rows * size;
  return rows;
}

// Converts codes of quantize, with two columns in a byte, to codes with two rows in a byte.
Tensor pairs_of_rows(const Tensor& codes, const c10::SymInt& rows, const c10::SymInt& h) {
  const Tensor matrix = codes.reshape_symint({rows, (h + 1) / 2});
  const Tensor each = at::stack({matrix.bitwise_and(15), matrix.bitwise_right_shift(4)}, -1)
                          .flatten(-2)
                          .slice_symint(1, 0, h);
  const Tensor upper = each.slice(0, 0, std::nullopt, 2), lower = each.slice(0, 1, std::nullopt, 2);
  const std::vector<c10::SymInt> pad = {0, 0, 0, upper.sym_size(0) - lower.sym_size(0)};
  return upper.bitwise_or(at::constant_pad_nd_symint(lower, pad).bitwise_left_shift(4));
}

// ---- quantize_columns

// The format must have blocks of 16 rows: columns or squares.
const Format& format_of_columns(const Checks& check, std::string_view name) {
  const Format& format = format_of(check, name);
  TORCH_CHECK(format.element == Element::E2M1 && format.block_rows == 16, "[", check.op(),
              "] format must be of NVFP4 with blocks of 16 rows, got '", name, "'");
  return format;
}

TensorSpecs columns_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const Format& format = format_of_columns(check, format_name);
  const TensorSpec codes{{(row_count(input) + 1) / 2, input.sym_size(-1)}, at::kByte};
  return {codes, scale_spec(format, input.sym_sizes())};
}

std::tuple<Tensor, Tensor> columns_decomposition(const Checks& check, const Tensor& x,
                                                 std::string_view format_name) {
  const auto [codes, scale] = quantize_decomposed(format_of_columns(check, format_name), x);
  return {pairs_of_rows(codes, row_count(x), x.sym_size(-1)), scale};
}

void columns_cuda(const Checks& check, const Tensor& x, std::string_view format_name, Tensor& codes,
                  Tensor& scale) {
  encode_row_pairs_cuda(format_of_columns(check, format_name), x, codes, scale);
}

// ---- stochastic

const Format& format_at_random(const Checks& check, std::string_view name) {
  const Format& format = format_of(check, name);
  TORCH_CHECK(format.element == Element::E2M1, "[", check.op(), "] format must be of NVFP4, got '",
              name, "'");
  return format;
}

TensorSpecs random_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  const Format& format = format_at_random(check, format_name);
  return {codes_spec(format, input.sym_sizes()), scale_spec(format, input.sym_sizes())};
}

std::tuple<Tensor, Tensor> random_decomposition(const Checks& check, const Tensor& x,
                                                std::string_view format_name) {
  return quantize_decomposed(format_at_random(check, format_name), x, /*stochastic=*/true);
}

std::tuple<Tensor, Tensor> random_columns_decomposition(const Checks& check, const Tensor& x,
                                                        std::string_view format_name) {
  const auto [codes, scale] =
      quantize_decomposed(format_of_columns(check, format_name), x, /*stochastic=*/true);
  return {pairs_of_rows(codes, row_count(x), x.sym_size(-1)), scale};
}

[[maybe_unused]] const bool registered = [] {
  register_for_both_passes(
      {.schema = "quantize_columns(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = columns_shape,
       .bodies = {columns_decomposition, columns_cuda, columns_decomposition},
       .differentiable = false,
       .makes = "quantize_columns"});
  register_plan_op(
      {.schema = "quantize_stochastic(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = random_shape,
       .bodies = {random_decomposition, random_decomposition, random_decomposition},
       .random = true,
       .differentiable = false});
  register_plan_op({.schema = "quantize_columns_stochastic(Tensor input, str format) -> "
                              "(Tensor codes, Tensor scale)",
                    .shape = columns_shape,
                    .bodies = {random_columns_decomposition, random_columns_decomposition,
                               random_columns_decomposition},
                    .random = true,
                    .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize_columns
