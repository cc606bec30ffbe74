#include "quantization/rounding.h"

#include <ATen/Parallel.h>
#include "kernels/encoding.h"
#include "kernels/quantize.h"
#include "wrappers/group_bands.h"
#include "wrappers/linear.h"

namespace transformer_ops {
using kernel::Format;
using kernel::TensorScale;

float largest_cpu(const Tensor& x) {
  const auto dtype = kernel_dtype(x);
  const auto larger = [](float a, float b) {
    return encoding::bits_of(a) > encoding::bits_of(b) ? a : b;
  };
  return at::parallel_reduce(
      0, x.numel(), 65536, 0.0f,
      [&](int64_t begin, int64_t end, float best) {
        const char* const from = element_at(x, begin);
        return larger(best, cpu::largest(dtype, from, end - begin));
      },
      larger);
}

TensorScale tensor_scale_cpu(const Format& format, const Tensor& x) {
  if (!format.per_tensor() && !format.has_tensor_scale()) return {};
  return encoding::scale_of_tensor(format, largest_cpu(x));
}

void round_cpu(const Format& format, const Tensor& x, const TensorScale& scale,
               const Tensor& output, std::optional<uint64_t> seed, int64_t first_row) {
  const FlatRows shape(x.sizes());
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto nearest = [&](int64_t element, int64_t rows, int64_t h) {
    cpu::round_to_format(format, from, to, element_at(x, element), scale,
                         element_at(output, element), rows, h);
  };
  const auto round_rows = [&](int64_t first, int64_t rows) {
    if (!seed) return nearest(first * shape.h, rows, shape.h);
    cpu::round_at_random(format, from, to, element_at(x, first * shape.h), scale, *seed,
                         first_row + first, element_at(output, first * shape.h), rows, shape.h);
  };
  if (!format.per_tensor()) {
    for_blocks(format, shape,
               [&](int64_t first, int64_t rows, int64_t) { round_rows(first, rows); });
  } else if (seed) {
    cpu::parallel(shape.rows, shape.h, 1,
                  [&](int64_t begin, int64_t end) { round_rows(begin, end - begin); });
  } else {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { nearest(begin, 1, end - begin); });
  }
}

void encode_operand_cpu(const Format& format, const Tensor& x, TensorScale scale,
                        const Tensor& output, std::optional<uint64_t> seed) {
  if (!is_codes(output.scalar_type())) {
    scale.decode = 1.0f;
    return round_cpu(format, x, scale, output, seed);
  }
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::quantize(format, kernel_dtype(x), element_at(x, begin), scale, bytes_at(output, begin),
                  /*scales=*/nullptr, 1, end - begin);
  });
}

Tensor round_decomposed(const Format& format, const Tensor& x, at::ScalarType dtype,
                        bool stochastic) {
  const auto [codes, scale] = quantize_decomposed(format, x, stochastic);
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

}  // namespace transformer_ops
