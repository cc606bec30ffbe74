#include "quantization/rounding.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>

#include "kernels/encoding.h"
#include "kernels/hadamard.h"
#include "kernels/quantize.h"
#include "wrappers/group_bands.h"
#include "wrappers/linear.h"

namespace transformer_ops {
namespace {

using kernel::Format;
using kernel::TensorScale;

using kernel::kHadamardRows;
using kernel::kHadamardSigns;

// Sylvester's matrix, [i, j] = (-1)^(number of ones that i and j share), with signs, orthonormal.
// It is made on the device, because a copy from the host would wait for it.
Tensor hadamard(const Tensor& like) {
  int64_t negated = 0;
  for (int64_t j = 0; j < kHadamardRows; ++j) {
    if (kHadamardSigns[j] < 0) negated |= int64_t{1} << j;
  }
  const Tensor i = at::arange(kHadamardRows, like.options().dtype(at::kInt));
  Tensor odd = i.unsqueeze(1).bitwise_and(i);
  for (const int half : {2, 1}) odd = odd.bitwise_xor(odd.bitwise_right_shift(half));
  const Tensor is_negated = at::bitwise_right_shift(at::full_like(i, negated), i);
  const Tensor is_minus = odd.bitwise_xor(is_negated).bitwise_and(1);
  return (0.25 - is_minus * 0.5).to(like.scalar_type());
}

// Transforms each 16 rows of a matrix.
Tensor turn_blocks(const Tensor& rows) {
  const Tensor blocks =
      rows.reshape_symint({rows.sym_size(0) / kHadamardRows, kHadamardRows, rows.sym_size(1)});
  return at::matmul(hadamard(rows), blocks).reshape_symint(rows.sym_sizes());
}

char* element_at(const Tensor& tensor, int64_t i) {
  return bytes_at(tensor, i * static_cast<int64_t>(tensor.element_size()));
}

}  // namespace

float largest_cpu(const Tensor& x) {
  const auto dtype = kernel_dtype(x);
  const auto larger = [](float a, float b) {
    return encoding::bits_of(a) > encoding::bits_of(b) ? a : b;
  };
  return at::parallel_reduce(
      0, x.numel(), 65536, 0.0f,
      [&](int64_t begin, int64_t end, float best) {
        const char* const from = bytes_at(x, begin * static_cast<int64_t>(x.element_size()));
        return larger(best, cpu::largest(dtype, from, end - begin));
      },
      larger);
}

TensorScale tensor_scale_cpu(const Format& format, const Tensor& x) {
  if (!format.per_tensor() && !format.has_tensor_scale()) return {};
  return encoding::scale_of_tensor(format, largest_cpu(x));
}

void round_to_format_cpu(const Format& format, const Tensor& x, const Tensor& output) {
  round_by_tensor_scale_cpu(format, x, tensor_scale_cpu(format, x), output);
}

void round_by_tensor_scale_cpu(const Format& format, const Tensor& x, const TensorScale& scale,
                               const Tensor& output) {
  const FlatRows shape(x.sizes());
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto run = [&](int64_t element, int64_t rows, int64_t h) {
    cpu::round_to_format(format, from, to, element_at(x, element), scale,
                         element_at(output, element), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, 1, end - begin); });
    return;
  }
  for_blocks(format, shape,
             [&](int64_t first, int64_t rows, int64_t) { run(first * shape.h, rows, shape.h); });
}

void encode_operand_cpu(const Format& format, const Tensor& x, const TensorScale& scale,
                        const Tensor& output) {
  if (!is_codes(output.scalar_type())) {
    round_by_tensor_scale_cpu(format, x, not_decoded(scale), output);
    return;
  }
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::quantize(format, kernel_dtype(x), element_at(x, begin), scale, bytes_at(output, begin),
                  /*scales=*/nullptr, 1, end - begin);
  });
}

Tensor round_to_format_decomposed(const Format& format, const Tensor& x, at::ScalarType dtype) {
  const auto [codes, scale] = quantize_decomposed(format, x);
  return dequantize_decomposed(format, codes, scale, x.sym_sizes(), dtype);
}

Tensor round_groups_decomposed(const Format& format, const Tensor& input, const Tensor& splits,
                               at::ScalarType dtype, bool stochastic) {
  const Tensor rows = as_matrix(input);
  const int64_t height = format.per_tensor() ? 1 : format.block_rows;
  const GroupBands bands(splits, rows.sym_size(0), height);
  const auto of_groups = [&](const Tensor& amax) { return bands.spread(bands.largest(amax), 0); };
  const Tensor rounded =
      round_bands_decomposed(format, bands.lay_out(rows), of_groups, dtype, stochastic);
  return bands.take_back(rounded).reshape_symint(input.sym_sizes());
}

std::tuple<Tensor, Tensor> round_groups_by_scale_decomposed(const Format& format,
                                                            const Tensor& input,
                                                            const Tensor& scales,
                                                            const Tensor& splits,
                                                            at::ScalarType dtype, double nothing) {
  const Tensor rows = as_matrix(input);
  const GroupBands bands(splits, rows.sym_size(0), /*height=*/1);
  const auto [rounded, of_rows] =
      round_rows_by_scale_decomposed(format, rows, bands.spread(scales, 1).unsqueeze(-1), dtype);
  const Tensor amax = bands.largest(of_rows).masked_fill(bands.has_rows().logical_not(), nothing);
  return {bands.take_back(rounded).reshape_symint(input.sym_sizes()), amax};
}

const Format& random_format(const Checks& check, std::string_view name) {
  const Format& format = format_of(check, name);
  TORCH_CHECK(kernel::is_floating(format.element), "[", check.op(),
              "] format must be floating, got '", name, "'");
  return format;
}

void round_at_random_cpu(const Format& format, const Tensor& x, uint64_t seed, int64_t first_row,
                         const Tensor& output) {
  round_at_random_cpu(format, x, tensor_scale_cpu(format, x), seed, first_row, output);
}

void round_at_random_cpu(const Format& format, const Tensor& x, const TensorScale& scale,
                         uint64_t seed, int64_t first_row, const Tensor& output) {
  const FlatRows shape(x.sizes());
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto run = [&](int64_t first, int64_t rows) {
    cpu::round_at_random(format, from, to, element_at(x, first * shape.h), scale, seed,
                         first_row + first, element_at(output, first * shape.h), rows, shape.h);
  };
  if (format.per_tensor()) {
    cpu::parallel(shape.rows, shape.h, 1,
                  [&](int64_t begin, int64_t end) { run(begin, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t first, int64_t rows, int64_t) { run(first, rows); });
}

Tensor round_at_random_decomposed(const Format& format, const Tensor& x, at::ScalarType dtype) {
  const auto [codes, scale] = quantize_decomposed(format, x, /*stochastic=*/true);
  return dequantize_decomposed(format, codes, scale, x.sym_sizes(), dtype);
}

void turn_columns_cpu(const Tensor& input, const Tensor& output) {
  const FlatRows shape(input.sizes());
  const int64_t blocks = (shape.rows + kHadamardRows - 1) / kHadamardRows;
  cpu::parallel(blocks, kHadamardRows * shape.h, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kHadamardRows;
    const int64_t last = std::min(end * kHadamardRows, shape.rows);
    cpu::hadamard_rows(kernel_dtype(input), element_at(input, first * shape.h),
                       element_at(output, first * shape.h), last - first, shape.h);
  });
}

Tensor turn_columns(const Tensor& input) {
  const Tensor x = to_accumulate(input), rows = x.dim() == 0 ? x.reshape({1, 1}) : as_matrix(x);
  const c10::SymInt whole = rows.sym_size(0) / kHadamardRows * kHadamardRows;
  const Tensor turned = turn_blocks(rows.slice_symint(0, 0, whole));
  return at::cat({turned, rows.slice_symint(0, whole)}).reshape_symint(x.sym_sizes());
}

Tensor turn_columns_of_groups(const Tensor& input, const Tensor& splits) {
  const Tensor rows = as_matrix(to_accumulate(input));
  const GroupBands bands(splits, rows.sym_size(0), kHadamardRows);
  const Tensor turned = bands.take_back_whole(turn_blocks(bands.lay_out(rows)), rows);
  return turned.reshape_symint(input.sym_sizes());
}

}  // namespace transformer_ops
