// Rounding to the numbers of a format: what the ops that do it share.
#pragma once

#include <algorithm>

#include "wrappers/cpu.h"
#include "wrappers/quantized.h"

namespace transformer_ops {

inline int64_t row_bytes(const kernel::Format& format, int64_t h) {
  return (h * format.bits + 7) / 8;
}

inline char* bytes_at(const Tensor& tensor, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes;
}

// f(first row, rows, first block) of whole blocks, on several threads.
template <typename Function>
void for_blocks(const kernel::Format& format, const FlatRows& shape, const Function& function) {
  const int64_t bands = (shape.rows + format.block_rows - 1) / format.block_rows;
  const int64_t across = (shape.h + format.block_columns - 1) / format.block_columns;
  cpu::parallel(bands, format.block_rows * shape.h, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * format.block_rows;
    const int64_t last = std::min(end * format.block_rows, shape.rows);
    function(first, last - first, begin * across);
  });
}

// The largest magnitude; NaN is larger than all numbers.
float largest_cpu(const Tensor& x);
// What the scales of blocks are relative to, or all there is of one; of formats without, ones.
kernel::TensorScale tensor_scale_cpu(const kernel::Format& format, const Tensor& x);

// Rounds to the values of codes: a later product multiplies them by the scale.
inline kernel::TensorScale not_decoded(kernel::TensorScale scale) {
  scale.decode = 1.0f;
  return scale;
}

void round_to_format_cpu(const kernel::Format& format, const Tensor& x, const Tensor& output);
// The same by a given scale of the tensor.
void round_by_tensor_scale_cpu(const kernel::Format& format, const Tensor& x,
                               const kernel::TensorScale& scale, const Tensor& output);
// Values of codes, not multiplied by `scale.decode`, or, where `output` is of their dtype, codes.
void encode_operand_cpu(const kernel::Format& format, const Tensor& x,
                        const kernel::TensorScale& scale, const Tensor& output);
Tensor round_to_format_decomposed(const kernel::Format& format, const Tensor& x,
                                  at::ScalarType dtype);

// The rows of each group as a tensor of their own, on the device alone; rows of none are zeros.
Tensor round_groups_decomposed(const kernel::Format& format, const Tensor& input,
                               const Tensor& splits, at::ScalarType dtype, bool stochastic = false);
// The same by a scale for each group; and the largest magnitude of each, `nothing` of no rows.
std::tuple<Tensor, Tensor> round_groups_by_scale_decomposed(const kernel::Format& format,
                                                            const Tensor& input,
                                                            const Tensor& scales,
                                                            const Tensor& splits,
                                                            at::ScalarType dtype, double nothing);

// Raises where numbers cannot be rounded to it at random: for a format of integers.
const kernel::Format& random_format(const Checks& check, std::string_view name);
// Up or down at random, so that the mean is the number itself. What becomes of a row depends on
// `seed` and on its number, of which x's first row has `first_row`.
void round_at_random_cpu(const kernel::Format& format, const Tensor& x, uint64_t seed,
                         int64_t first_row, const Tensor& output);
void round_at_random_cpu(const kernel::Format& format, const Tensor& x,
                         const kernel::TensorScale& scale, uint64_t seed, int64_t first_row,
                         const Tensor& output);
// The same by numbers of torch's generator.
Tensor round_at_random_decomposed(const kernel::Format& format, const Tensor& x,
                                  at::ScalarType dtype);

// Each 16 rows of a matrix turned into 16 sums and differences of them, which are orthonormal: a
// product that sums over the rows of two such tensors stays as it is. The rows that are left stay,
// too. In float32, of doubles in float64. The kernel adds in another order than the ATen call.
void turn_columns_cpu(const Tensor& input, const Tensor& output);
Tensor turn_columns(const Tensor& input);
Tensor turn_columns_of_groups(const Tensor& input, const Tensor& splits);

}  // namespace transformer_ops
