// Quantized tensors: conversion to and from codes and scales in a format of kernels/format.h.
//
// All leading dimensions count as rows. Blocks run along the last dimension, and the last block of
// a row may be shorter. The ops have no gradient: their results never require one.

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>

#include <cstring>
#include <optional>

#include "kernels/quantize.h"
#include "op/op.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cuda.h"

namespace transformer_ops::ops::quantize {
namespace {

using kernel::Element;
using kernel::Format;

// Calls run(element, byte, block, rows, h) for the parts of a tensor, on several threads: the
// first element of a part, the first byte of its codes, its first scale, and its sizes.
template <typename Run>
void for_parts(const Format& format, const Tensor& x, const Run& run) {
  const FlatRows shape(x.sizes());
  if (format.per_tensor()) {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, begin, 0, 1, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t row, int64_t rows, int64_t block) {
    run(row * shape.h, row * row_bytes(format, shape.h), block, rows, shape.h);
  });
}

// ---- quantize, and quantize_stochastic for products on GPUs

TensorSpecs quantize_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  const Format& format = format_of(check, format_name);
  return {codes_spec(format, input.sym_sizes()), scale_spec(format, input.sym_sizes())};
}

TensorSpecs stochastic_shape(const Checks& check, const Tensor& input, std::string_view format) {
  TORCH_CHECK(format_of(check, format).element == Element::E2M1, "[", check.op(),
              "] format must be of NVFP4, got '", format, "'");
  return quantize_shape(check, input, format);
}

void quantize_cpu(const Checks& check, const Tensor& x, std::string_view format_name, Tensor& codes,
                  Tensor& scale) {
  const Format& format = format_of(check, format_name);
  const auto dtype = kernel_dtype(x);
  const kernel::TensorScale of_tensor = tensor_scale_cpu(format, x);
  if (uint8_t* const to = tensor_scale_of(format, scale)) {
    std::memcpy(to, &of_tensor.decode, sizeof(of_tensor.decode));
  }
  for_parts(format, x, [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::quantize(format, dtype, element_at(x, element), of_tensor, bytes_at(codes, byte),
                  element_at(scale, block), rows, h);
  });
}

void quantize_cuda(const Checks& check, const Tensor& x, std::string_view format_name,
                   Tensor& codes, Tensor& scale) {
  const Format& format = format_of(check, format_name);
  encode_cuda(format, x, cuda::write(codes), cuda::write(scale), tensor_scale_of(format, scale));
}

auto quantize_decomposition(bool at_random) {
  return [=](const Checks& check, const Tensor& x, std::string_view format) {
    return quantize_decomposed(format_of(check, format), x, at_random);
  };
}

// ---- quantize_columns, for operands of NVFP4 products that are summed over their rows: two codes
// of a byte must follow each other along the sum, so they are those of two rows, and there are half
// as many rows.

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

// The format must have blocks of 16 rows: columns or squares.
TensorSpecs columns_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const Format& format = format_of(check, format_name);
  TORCH_CHECK(format.element == Element::E2M1 && format.block_rows == 16, "[", check.op(),
              "] format must be of NVFP4 with blocks of 16 rows, got '", format_name, "'");
  const TensorSpec codes{{(row_count(input) + 1) / 2, input.sym_size(-1)}, at::kByte};
  return {codes, scale_spec(format, input.sym_sizes())};
}

void columns_cuda(const Checks& check, const Tensor& x, std::string_view format, Tensor& codes,
                  Tensor& scale) {
  encode_row_pairs_cuda(format_of(check, format), x, codes, scale);
}

auto columns_decomposition(bool at_random) {
  return [=](const Checks& check, const Tensor& x,
             std::string_view format) -> std::tuple<Tensor, Tensor> {
    const auto [codes, scale] = quantize_decomposed(format_of(check, format), x, at_random);
    return {pairs_of_rows(codes, row_count(x), x.sym_size(-1)), scale};
  };
}

// ---- dequantize

// The sizes of the tensor that was quantized, if the caller passes them; else they follow from the
// codes.
using GivenSizes = std::optional<std::vector<c10::SymInt>>;

c10::SymDimVector sizes_of(const Checks& check, const Tensor& codes, const Format& format,
                           const GivenSizes& given) {
  if (!given) {
    c10::SymDimVector sizes(codes.sym_sizes());
    if (format.bits == 4 && !sizes.empty()) sizes.back() = sizes.back() * 2;
    return sizes;
  }
  for (const auto& size : *given) {
    TORCH_CHECK(size >= 0, "[", check.op(), "] shape must have no negative size, got ", size);
  }
  return c10::SymDimVector(given->begin(), given->end());
}

TensorSpecs dequantize_shape(const Checks& check, const Tensor& codes, const Tensor& scale,
                             std::string_view format_name, std::string_view dtype_name,
                             GivenSizes given) {
  const Format& format = format_of(check, format_name);
  const auto dtype = dtype_named(check, dtype_name);
  const auto sizes = sizes_of(check, codes, format, given);
  check.spec("codes", codes, codes_spec(format, sizes));
  check.spec("scale", scale, scale_spec(format, sizes));
  return {{sizes, dtype}};
}

void dequantize_cpu(const Checks& check, const Tensor& codes, const Tensor& scale,
                    std::string_view format_name, std::string_view, GivenSizes, Tensor& output) {
  const Format& format = format_of(check, format_name);
  const auto dtype = kernel_dtype(output);
  float decoded = 1.0f;
  if (const uint8_t* const from = tensor_scale_of(format, scale)) {
    std::memcpy(&decoded, from, sizeof(decoded));
  }
  for_parts(format, output,
            [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
              cpu::dequantize(format, dtype, bytes_at(codes, byte), element_at(scale, block),
                              decoded, element_at(output, element), rows, h);
            });
}

void dequantize_cuda(const Checks& check, const Tensor& codes, const Tensor& scale,
                     std::string_view format_name, std::string_view, GivenSizes, Tensor& output) {
  const Format& format = format_of(check, format_name);
  const FlatRows shape(output.sizes());
  cuda::dequantize(cuda::stream_of(output), format, kernel_dtype(output), cuda::read(codes),
                   cuda::read(scale), tensor_scale_of(format, scale), cuda::write(output),
                   shape.rows, shape.h);
}

Tensor dequantize_decomposition(const Checks& check, const Tensor& codes, const Tensor& scale,
                                std::string_view format_name, std::string_view dtype_name,
                                GivenSizes given) {
  const Format& format = format_of(check, format_name);
  return dequantize_decomposed(format, codes, scale, sizes_of(check, codes, format, given),
                               dtype_named(check, dtype_name));
}

[[maybe_unused]] const bool registered = [] {
  register_typed_op(
      {.schema = "quantize(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = quantize_shape,
       .bodies = {quantize_cpu, quantize_cuda, quantize_decomposition(/*at_random=*/false)},
       .differentiable = false,
       .is_shared = true});
  register_typed_op(
      {.schema = "quantize_columns(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = columns_shape,
       .bodies = {columns_decomposition(/*at_random=*/false), columns_cuda,
                  columns_decomposition(/*at_random=*/false)},
       .differentiable = false,
       .is_shared = true});
  const auto stochastic = quantize_decomposition(/*at_random=*/true);
  register_plan_op(
      {.schema = "quantize_stochastic(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = stochastic_shape,
       .bodies = {stochastic, stochastic, stochastic},
       .random = true,
       .differentiable = false});
  const auto columns_stochastic = columns_decomposition(/*at_random=*/true);
  register_plan_op({.schema = "quantize_columns_stochastic(Tensor input, str format) -> "
                              "(Tensor codes, Tensor scale)",
                    .shape = columns_shape,
                    .bodies = {columns_stochastic, columns_stochastic, columns_stochastic},
                    .random = true,
                    .differentiable = false});
  register_typed_op({.schema = "dequantize(Tensor codes, Tensor scale, str format, str dtype, "
                               "SymInt[]? shape=None) -> Tensor output",
                     .shape = dequantize_shape,
                     .bodies = {dequantize_cpu, dequantize_cuda, dequantize_decomposition},
                     .differentiable = false});
  return register_op({.declaration = {.kind = "Quantize",
                                      .summary = "x rounded to the formats of a recipe",
                                      .attributes = {"rounds_input", "rounds_grad_output"},
                                      .operands = {"input"}}});
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize
