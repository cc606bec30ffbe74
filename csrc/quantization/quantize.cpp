// Quantized tensors: conversion to and from codes and scales in a format of kernels/format.h.
//
// All leading dimensions count as rows. Blocks run along the last dimension, and the last block of
// a row may be shorter. The ops have no gradient: their results never require one.

#include <cstring>
#include <optional>

#include "kernels/quantize.h"
#include "op/op.h"
#include "op/recompute.h"
#include "quantization/quantized_cuda.h"
#include "quantization/rounding.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops::ops::quantize {
namespace {

using kernel::Format;

// ---- quantize

TensorSpecs quantize_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  const Format& format = format_of(check, format_name);
  return {codes_spec(format, input.sym_sizes()), scale_spec(format, input.sym_sizes())};
}

void quantize_cpu(const Checks& check, const Tensor& x, std::string_view format_name, Tensor& codes,
                  Tensor& scale) {
  const Format& format = format_of(check, format_name);
  const FlatRows shape(x.sizes());
  const auto dtype = kernel_dtype(x);
  const auto size = static_cast<int64_t>(x.element_size());
  const kernel::TensorScale of_tensor = tensor_scale_cpu(format, x);
  if (uint8_t* const to = tensor_scale_of(format, scale)) {
    std::memcpy(to, &of_tensor.decode, sizeof(of_tensor.decode));
  }
  const auto run = [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::quantize(format, dtype, bytes_at(x, element * size), of_tensor, bytes_at(codes, byte),
                  bytes_at(scale, block * static_cast<int64_t>(scale.element_size())), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, begin, 0, 1, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t row, int64_t rows, int64_t block) {
    run(row * shape.h, row * row_bytes(format, shape.h), block, rows, shape.h);
  });
}

void quantize_cuda(const Checks& check, const Tensor& x, std::string_view format_name,
                   Tensor& codes, Tensor& scale) {
  const Format& format = format_of(check, format_name);
  encode_cuda(format, x, cuda::write(codes), cuda::write(scale), tensor_scale_of(format, scale));
}

std::tuple<Tensor, Tensor> quantize_decomposition(const Checks& check, const Tensor& x,
                                                  std::string_view format_name) {
  return quantize_decomposed(format_of(check, format_name), x);
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
  const FlatRows shape(output.sizes());
  const auto dtype = kernel_dtype(output);
  const auto size = static_cast<int64_t>(output.element_size());
  float decoded = 1.0f;
  if (const uint8_t* const from = tensor_scale_of(format, scale)) {
    std::memcpy(&decoded, from, sizeof(decoded));
  }
  const auto run = [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::dequantize(format, dtype, bytes_at(codes, byte),
                    bytes_at(scale, block * static_cast<int64_t>(scale.element_size())), decoded,
                    bytes_at(output, element * size), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(output.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, begin, 0, 1, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t row, int64_t rows, int64_t block) {
    run(row * shape.h, row * row_bytes(format, shape.h), block, rows, shape.h);
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

// ---- dequantize.saved: the same in backward. A gradient argument prevents a compiler from
// decoding in forward what was encoded to save memory.

TensorSpecs dequantize_saved_shape(const Checks& check, const Tensor&, const Tensor& codes,
                                   const Tensor& scale, std::string_view format,
                                   std::string_view dtype) {
  return dequantize_shape(check, codes, scale, format, dtype, std::nullopt);
}

void dequantize_saved_cpu(const Checks& check, const Tensor&, const Tensor& codes,
                          const Tensor& scale, std::string_view format, std::string_view dtype,
                          Tensor& output) {
  dequantize_cpu(check, codes, scale, format, dtype, std::nullopt, output);
}

void dequantize_saved_cuda(const Checks& check, const Tensor&, const Tensor& codes,
                           const Tensor& scale, std::string_view format, std::string_view dtype,
                           Tensor& output) {
  dequantize_cuda(check, codes, scale, format, dtype, std::nullopt, output);
}

Tensor dequantize_saved_decomposition(const Checks& check, const Tensor&, const Tensor& codes,
                                      const Tensor& scale, std::string_view format,
                                      std::string_view dtype) {
  return dequantize_decomposition(check, codes, scale, format, dtype, std::nullopt);
}

// ---- quantize_dequantize: rounds numbers to those of a format, for ops with plain arguments. In
// backward it also has a gradient argument.

TensorSpecs rounded_shape(const Checks& check, const Tensor& input, std::string_view format,
                          std::string_view dtype) {
  check.compute_dtype("input", input);
  format_of(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec};
}

void rounded_cpu(const Checks& check, const Tensor& x, std::string_view format, std::string_view,
                 Tensor& output) {
  round_to_format_cpu(format_of(check, format), x, output);
}

void rounded_cuda(const Checks& check, const Tensor& x, std::string_view format,
                  std::string_view dtype, Tensor& output) {
  const Format& row = format_of(check, format);
  const auto make = [&](const TensorSpec& spec) {
    return empty(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype, x.device());
  };
  Tensor codes = make(codes_spec(row, x.sym_sizes())), scale = make(scale_spec(row, x.sym_sizes()));
  quantize_cuda(check, x, format, codes, scale);
  dequantize_cuda(check, codes, scale, format, dtype, std::nullopt, output);
}

Tensor rounded_decomposition(const Checks& check, const Tensor& x, std::string_view format_name,
                             std::string_view dtype) {
  return round_to_format_decomposed(format_of(check, format_name), x, dtype_named(check, dtype));
}

// ---- quantize_dequantize_stochastic: the same, up or down at random

TensorSpecs stochastic_shape(const Checks& check, const Tensor& input, std::string_view format,
                             std::string_view dtype) {
  random_format(check, format);
  return rounded_shape(check, input, format, dtype);
}

void stochastic_cpu(const Checks& check, const Tensor& x, std::string_view format, std::string_view,
                    Tensor& output) {
  round_at_random_cpu(random_format(check, format), x, draw_seed(), /*first_row=*/0, output);
}

Tensor stochastic_decomposition(const Checks& check, const Tensor& x, std::string_view format,
                                std::string_view dtype) {
  return round_at_random_decomposed(random_format(check, format), x, dtype_named(check, dtype));
}

// ---- hadamard_columns: turns each 16 rows into 16 sums and differences of them, in float32. The
// transform is orthonormal, so a product that sums over the rows of two such tensors does not
// change. Remaining rows do not change, either.

TensorSpecs turned_shape(const Checks& check, const Tensor&, const Tensor& input) {
  check.compute_dtype("input", input);
  TensorSpec spec = like(input);
  spec.dtype = accumulate_dtype(input.scalar_type());
  return {spec};
}

void turned_cpu(const Tensor&, const Tensor& input, Tensor& output) {
  turn_columns_cpu(input, output);
}

Tensor turned_decomposition(const Tensor&, const Tensor& input) { return turn_columns(input); }

[[maybe_unused]] const bool registered = [] {
  register_for_both_passes(
      {.schema = "quantize(Tensor input, str format) -> (Tensor codes, Tensor scale)",
       .shape = quantize_shape,
       .bodies = {quantize_cpu, quantize_cuda, quantize_decomposition},
       .differentiable = false,
       .makes = "quantize"});
  register_typed_op({.schema = "dequantize(Tensor codes, Tensor scale, str format, str dtype, "
                               "SymInt[]? shape=None) -> Tensor output",
                     .shape = dequantize_shape,
                     .bodies = {dequantize_cpu, dequantize_cuda, dequantize_decomposition},
                     .differentiable = false});
  register_plan_op(
      {.schema = "dequantize.saved(Tensor grad_output, Tensor codes, Tensor scale, "
                 "str format, str dtype) -> Tensor output",
       .shape = dequantize_saved_shape,
       .bodies = {dequantize_saved_cpu, dequantize_saved_cuda, dequantize_saved_decomposition},
       .reads_first = false,
       .differentiable = false});
  register_for_both_passes({.schema = "quantize_dequantize(Tensor input, str format, str dtype) -> "
                                      "Tensor output",
                            .shape = rounded_shape,
                            .bodies = {rounded_cpu, rounded_cuda, rounded_decomposition},
                            .differentiable = false,
                            .makes = "quantize_dequantize"});
  register_typed_op({.schema = "quantize_dequantize_stochastic(Tensor input, str format, "
                               "str dtype) -> Tensor output",
                     .shape = stochastic_shape,
                     .bodies = {stochastic_cpu, stochastic_decomposition, stochastic_decomposition},
                     .random = true,
                     .differentiable = false});
  register_typed_op(
      {.schema = "hadamard_columns(Tensor grad_output, Tensor input) -> Tensor output",
       .shape = turned_shape,
       .bodies = {turned_cpu, turned_decomposition, turned_decomposition},
       .reads_first = false,
       .differentiable = false});
  return register_op({.declaration = {.kind = "Quantize",
                                      .summary = "x rounded to the formats of a recipe",
                                      .attributes = {"rounds_input", "rounds_grad_output"},
                                      .operands = {"input"}}});
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize
