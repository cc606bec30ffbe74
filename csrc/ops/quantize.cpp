// Quantized tensors: codes and scales in one of the formats of kernels/format.h, and back.
//
// Rows are the leading dimensions together, blocks run along the last one; the last block of a row
// may be shorter. No gradient passes: neither op's results require one, whatever the arguments.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <cstring>
#include <optional>

#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/grouped.h"
#include "bodies/linear.h"
#include "bodies/product.h"
#include "bodies/quantized.h"
#include "kernels/encoding.h"
#include "kernels/quantize.h"

namespace transformer_ops::ops::quantize {
namespace {

using kernel::Format;

int64_t row_bytes(const Format& format, int64_t h) { return (h * format.bits + 7) / 8; }

// f(first row, rows, first block) of whole blocks, on several threads.
template <typename Function>
void for_blocks(const Format& format, const FlatRows& shape, const Function& function) {
  const int64_t bands = (shape.rows + format.block_rows - 1) / format.block_rows;
  const int64_t across = (shape.h + format.block_columns - 1) / format.block_columns;
  cpu::parallel(bands, format.block_rows * shape.h, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * format.block_rows;
    const int64_t last = std::min(end * format.block_rows, shape.rows);
    function(first, last - first, begin * across);
  });
}

char* at(const Tensor& tensor, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes;
}

// ---- quantize

TensorSpecs quantize_shape(const Checks& check, const Tensor& input, std::string_view format_name) {
  check.compute_dtype("input", input);
  const Format& format = format_of(check, format_name);
  return {codes_spec(format, input.sym_sizes()), scale_spec(format, input.sym_sizes())};
}

float largest_cpu(const Tensor& x) {
  const auto dtype = kernel_dtype(x);
  const auto larger = [](float a, float b) {
    return encoding::bits_of(a) > encoding::bits_of(b) ? a : b;
  };
  return at::parallel_reduce(
      0, x.numel(), 65536, 0.0f,
      [&](int64_t begin, int64_t end, float best) {
        const char* const from = at(x, begin * static_cast<int64_t>(x.element_size()));
        return larger(best, cpu::largest(dtype, from, end - begin));
      },
      larger);
}

void quantize_cpu(const Checks& check, const Tensor& x, std::string_view format_name, Tensor& codes,
                  Tensor& scale) {
  const Format& format = format_of(check, format_name);
  const FlatRows shape(x.sizes());
  const auto dtype = kernel_dtype(x);
  const auto size = static_cast<int64_t>(x.element_size());
  float tensor_scale = 1.0f;
  if (uint8_t* const to = tensor_scale_of(format, scale)) {
    tensor_scale = encoding::tensor_scale(format, largest_cpu(x));
    const float decoded = 1.0f / tensor_scale;
    std::memcpy(to, &decoded, sizeof(decoded));
  }
  const auto run = [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::quantize(format, dtype, at(x, element * size), tensor_scale, at(codes, byte),
                  at(scale, block * static_cast<int64_t>(scale.element_size())), rows, h);
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
  const FlatRows shape(x.sizes());
  const auto stream = cuda::stream_of(x);
  uint8_t* const tensor_scale = tensor_scale_of(format, scale);
  Tensor amax;
  if (tensor_scale != nullptr) {
    amax = empty({cuda::largest_parts(x.numel())}, at::kFloat, x.device());
    cuda::largest(stream, kernel_dtype(x), cuda::read(x), amax.mutable_data_ptr<float>(),
                  x.numel());
  }
  cuda::quantize(stream, format, kernel_dtype(x), cuda::read(x),
                 amax.defined() ? amax.const_data_ptr<float>() : nullptr, cuda::write(codes),
                 cuda::write(scale), tensor_scale, shape.rows, shape.h);
}

std::tuple<Tensor, Tensor> quantize_meaning(const Checks& check, const Tensor& x,
                                            std::string_view format_name) {
  return quantize_unfused(format_of(check, format_name), x);
}

// ---- dequantize

// Of the tensor that was quantized, if the caller says it; else what the codes say.
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
    cpu::dequantize(format, dtype, at(codes, byte),
                    at(scale, block * static_cast<int64_t>(scale.element_size())), decoded,
                    at(output, element * size), rows, h);
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

Tensor dequantize_meaning(const Checks& check, const Tensor& codes, const Tensor& scale,
                          std::string_view format_name, std::string_view dtype_name,
                          GivenSizes given) {
  const Format& format = format_of(check, format_name);
  return dequantize_unfused(format, codes, scale, sizes_of(check, codes, format, given),
                            dtype_named(check, dtype_name));
}

// ---- decode_saved: dequantize in backward, behind a gradient that keeps a compiler from decoding
// in forward what was encoded to save memory

TensorSpecs decode_saved_shape(const Checks& check, const Tensor&, const Tensor& codes,
                               const Tensor& scale, std::string_view format,
                               std::string_view dtype) {
  return dequantize_shape(check, codes, scale, format, dtype, std::nullopt);
}

void decode_saved_cpu(const Checks& check, const Tensor&, const Tensor& codes, const Tensor& scale,
                      std::string_view format, std::string_view dtype, Tensor& output) {
  dequantize_cpu(check, codes, scale, format, dtype, std::nullopt, output);
}

void decode_saved_cuda(const Checks& check, const Tensor&, const Tensor& codes, const Tensor& scale,
                       std::string_view format, std::string_view dtype, Tensor& output) {
  dequantize_cuda(check, codes, scale, format, dtype, std::nullopt, output);
}

Tensor decode_saved_meaning(const Checks& check, const Tensor&, const Tensor& codes,
                            const Tensor& scale, std::string_view format, std::string_view dtype) {
  return dequantize_meaning(check, codes, scale, format, dtype, std::nullopt);
}

// ---- quantize_dequantize: numbers rounded to those of a format, which an op with plain arguments
// then takes; in backward behind a gradient, as above

TensorSpecs rounded_shape(const Checks& check, const Tensor& input, std::string_view format,
                          std::string_view dtype) {
  check.compute_dtype("input", input);
  format_of(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec};
}

// Codes and scales of a few rows at a time, which stay in the cache.
void round_to_format(const Format& format, const Tensor& x, const Tensor& output) {
  const FlatRows shape(x.sizes());
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto size = static_cast<int64_t>(x.element_size());
  const auto output_size = static_cast<int64_t>(output.element_size());
  float tensor_scale = 1.0f;
  if (format.per_tensor() || format.has_tensor_scale()) {
    tensor_scale = encoding::tensor_scale(format, largest_cpu(x));
  }
  const auto run = [&](int64_t element, int64_t rows, int64_t h, std::vector<char>& codes,
                       std::vector<float>& scales) {
    cpu::quantize(format, from, at(x, element * size), tensor_scale, codes.data(), scales.data(),
                  rows, h);
    cpu::dequantize(format, to, codes.data(), scales.data(), 1.0f / tensor_scale,
                    at(output, element * output_size), rows, h);
  };
  if (format.per_tensor()) {
    constexpr int64_t kPiece = 4096;
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
      std::vector<char> codes(kPiece);
      std::vector<float> scales(1);
      for (int64_t i = begin; i < end; i += kPiece) {
        run(i, 1, std::min(kPiece, end - i), codes, scales);
      }
    });
    return;
  }
  const int64_t rows_at_once = std::max<int64_t>(format.block_rows, 16);
  for_blocks(format, shape, [&](int64_t first, int64_t rows, int64_t) {
    std::vector<char> codes(rows_at_once * row_bytes(format, shape.h));
    // Of at least one byte each.
    std::vector<float> scales(rows_at_once * shape.h);
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      run((first + row) * shape.h, std::min(rows_at_once, rows - row), shape.h, codes, scales);
    }
  });
}

void rounded_cpu(const Checks& check, const Tensor& x, std::string_view format, std::string_view,
                 Tensor& output) {
  round_to_format(format_of(check, format), x, output);
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

Tensor rounded_meaning(const Checks& check, const Tensor& x, std::string_view format_name,
                       std::string_view dtype) {
  const Format& format = format_of(check, format_name);
  const auto [codes, scale] = quantize_unfused(format, x);
  return dequantize_unfused(format, codes, scale, x.sym_sizes(), dtype_named(check, dtype));
}

TensorSpecs rounded_saved_shape(const Checks& check, const Tensor&, const Tensor& input,
                                std::string_view format, std::string_view dtype) {
  return rounded_shape(check, input, format, dtype);
}

void rounded_saved_cpu(const Checks& check, const Tensor&, const Tensor& input,
                       std::string_view format, std::string_view dtype, Tensor& output) {
  rounded_cpu(check, input, format, dtype, output);
}

void rounded_saved_cuda(const Checks& check, const Tensor&, const Tensor& input,
                        std::string_view format, std::string_view dtype, Tensor& output) {
  rounded_cuda(check, input, format, dtype, output);
}

Tensor rounded_saved_meaning(const Checks& check, const Tensor&, const Tensor& input,
                             std::string_view format, std::string_view dtype) {
  return rounded_meaning(check, input, format, dtype);
}

// ---- quantize_dequantize_stochastic: the same, up or down at random

Tensor stochastic_meaning(const Checks& check, const Tensor& x, std::string_view format_name,
                          std::string_view dtype) {
  const Format& format = format_of(check, format_name);
  TORCH_CHECK(format.element != kernel::Element::Int8, "[", check.op(),
              "] format must be floating, got '", format_name, "'");
  const auto [codes, scale] = quantize_unfused(format, x, /*stochastic=*/true);
  return dequantize_unfused(format, codes, scale, x.sym_sizes(), dtype_named(check, dtype));
}

// ---- hadamard_columns: each 16 rows turned into 16 sums and differences of them, which are
// orthonormal: a product that sums over the rows of two such tensors stays as it is. The rows that
// are left stay, too. In float32.

constexpr int64_t kTurned = 16;
// Of TransformerEngine's recipe; which rows are negated first is arbitrary, but the same for both
// operands.
constexpr float kSigns[kTurned] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

TensorSpecs turned_shape(const Checks& check, const Tensor&, const Tensor& input) {
  check.compute_dtype("input", input);
  TensorSpec spec = like(input);
  spec.dtype = accumulate_dtype(input.scalar_type());
  return {spec};
}

// Sylvester's matrix, [i, j] = (-1)^(ones that i and j share), with signs, orthonormal.
Tensor hadamard(const Tensor& like) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < kTurned; ++i) {
    for (int64_t j = 0; j < kTurned; ++j) {
      const bool is_odd = std::popcount(static_cast<uint64_t>(i & j)) % 2 == 1;
      numbers.push_back(kSigns[j] * (is_odd ? -0.25f : 0.25f));
    }
  }
  return at::tensor(numbers, at::kFloat).view({kTurned, kTurned}).to(like.options());
}

Tensor turned_meaning(const Tensor&, const Tensor& input) {
  const Tensor x = to_accumulate(input);
  const c10::SymInt h = x.dim() == 0 ? c10::SymInt(1) : x.sym_size(-1);
  const Tensor rows = x.reshape_symint({-1, h});
  const c10::SymInt whole = rows.sym_size(0) / kTurned * kTurned;
  const Tensor blocks = rows.slice_symint(0, 0, whole).reshape_symint({-1, kTurned, h});
  const Tensor turned = at::matmul(hadamard(x), blocks).reshape_symint({whole, h});
  return at::cat({turned, rows.slice_symint(0, whole)}).reshape_symint(x.sym_sizes());
}

// ---- quantize_dequantize_groups: of the operands of grouped products, where each group is a
// tensor of its own, so that no block and no scale is of two

// The matrices that are rounded, as rows (first, count): those of groups of rows, or, without
// splits, those of a tensor of three dimensions.
Groups groups_of(const Checks& check, const Tensor& input, const Tensor* splits) {
  if (splits != nullptr) return Groups(check, splits->cpu(), as_matrix(input).size(0));
  const auto count = at::full({input.size(0)}, input.size(1), at::kLong);
  return Groups(check, count, input.size(0) * input.size(1));
}

TensorSpecs groups_shape(const Checks& check, const Tensor& input, const Tensor* splits,
                         std::string_view format, std::string_view dtype) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  TORCH_CHECK(splits != nullptr || input.dim() == 3, "[", check.op(),
              "] input must have 3 dimensions where there are no splits, got shape ",
              input.sym_sizes());
  if (splits != nullptr) check_splits(check, *splits, splits->dim() > 0 ? splits->sym_size(0) : 0);
  format_of(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec};
}

void groups_cpu(const Checks& check, const Tensor& input, const Tensor* splits,
                std::string_view format_name, std::string_view, Tensor& output) {
  const kernel::Format& format = format_of(check, format_name);
  const Groups groups = groups_of(check, input, splits);
  const Tensor x = as_matrix(input), y = as_matrix(output);
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count > 0) round_to_format(format, rows_of(x, first, count), rows_of(y, first, count));
  }
  zero_rest_cpu(groups, y);
}

Tensor groups_meaning(const Checks& check, const Tensor& input, const Tensor* splits,
                      std::string_view format_name, std::string_view dtype) {
  const kernel::Format& format = format_of(check, format_name);
  const Groups groups = groups_of(check, input, splits);
  const auto wanted = dtype_named(check, dtype);
  const Tensor x = as_matrix(input);
  const Tensor rest = at::zeros({x.size(0) - groups.rows(), x.size(1)}, x.options().dtype(wanted));
  Tensors parts;
  for (int64_t group = 0; group < groups.count(); ++group) {
    const Tensor rows = x.narrow(0, groups.begin(group), groups.size(group));
    const auto [codes, scale] = quantize_unfused(format, rows);
    parts.push_back(dequantize_unfused(format, codes, scale, rows.sym_sizes(), wanted));
  }
  parts.push_back(rest);
  return at::cat(parts).view(input.sizes());
}

TensorSpecs groups_saved_shape(const Checks& check, const Tensor&, const Tensor& input,
                               const Tensor* splits, std::string_view format,
                               std::string_view dtype) {
  return groups_shape(check, input, splits, format, dtype);
}

void groups_saved_cpu(const Checks& check, const Tensor&, const Tensor& input, const Tensor* splits,
                      std::string_view format, std::string_view dtype, Tensor& output) {
  groups_cpu(check, input, splits, format, dtype, output);
}

Tensor groups_saved_meaning(const Checks& check, const Tensor&, const Tensor& input,
                            const Tensor* splits, std::string_view format, std::string_view dtype) {
  return groups_meaning(check, input, splits, format, dtype);
}

[[maybe_unused]] const bool registered = [] {
  register_typed_op({.schema = "quantize(Tensor input, str format) -> (Tensor codes, Tensor scale)",
                     .shape = quantize_shape,
                     .bodies = {quantize_cpu, quantize_cuda, quantize_meaning},
                     .differentiable = false});
  register_typed_op({.schema = "dequantize(Tensor codes, Tensor scale, str format, str dtype, "
                               "SymInt[]? shape=None) -> Tensor output",
                     .shape = dequantize_shape,
                     .bodies = {dequantize_cpu, dequantize_cuda, dequantize_meaning},
                     .differentiable = false});
  register_typed_op({.schema = "decode_saved(Tensor grad_output, Tensor codes, Tensor scale, "
                               "str format, str dtype) -> Tensor output",
                     .shape = decode_saved_shape,
                     .bodies = {decode_saved_cpu, decode_saved_cuda, decode_saved_meaning},
                     .reads_first = false,
                     .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize(Tensor input, str format, str dtype) -> "
                               "Tensor output",
                     .shape = rounded_shape,
                     .bodies = {rounded_cpu, rounded_cuda, rounded_meaning},
                     .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize_saved(Tensor grad_output, Tensor input, "
                               "str format, str dtype) -> Tensor output",
                     .shape = rounded_saved_shape,
                     .bodies = {rounded_saved_cpu, rounded_saved_cuda, rounded_saved_meaning},
                     .reads_first = false,
                     .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize_stochastic(Tensor input, str format, "
                               "str dtype) -> Tensor output",
                     .shape = rounded_shape,
                     .bodies = {.unfused = stochastic_meaning},
                     .random = true,
                     .differentiable = false});
  register_typed_op(
      {.schema = "hadamard_columns(Tensor grad_output, Tensor input) -> Tensor output",
       .shape = turned_shape,
       .bodies = {.unfused = turned_meaning},
       .reads_first = false,
       .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize_groups(Tensor input, Tensor? splits, "
                               "str format, str dtype) -> Tensor output",
                     .shape = groups_shape,
                     .bodies = {groups_cpu, groups_meaning, groups_meaning},
                     .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize_groups_saved(Tensor grad_output, "
                               "Tensor input, Tensor? splits, str format, str dtype) -> "
                               "Tensor output",
                     .shape = groups_saved_shape,
                     .bodies = {groups_saved_cpu, groups_saved_meaning, groups_saved_meaning},
                     .reads_first = false,
                     .differentiable = false});
  return register_op({.declaration = {.kind = "Quantize",
                                      .summary = "x rounded to the formats of a recipe",
                                      .attributes = {"rounds_input", "rounds_grad_output"},
                                      .operands = {"input"}}});
}();

}  // namespace
}  // namespace transformer_ops::ops::quantize
