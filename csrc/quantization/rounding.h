// Code shared by the ops that round to the numbers of a format.
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

// Calls f(first row, rows, first block) for whole blocks, on several threads.
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
// The scale of the tensor: the only scale, or the one that block scales are relative to. It is 1 if
// the format has none.
kernel::TensorScale tensor_scale_cpu(const kernel::Format& format, const Tensor& x);

// The scale for rounding to the values of codes, which a later product multiplies by the scale.
inline kernel::TensorScale not_decoded(kernel::TensorScale scale) {
  scale.decode = 1.0f;
  return scale;
}

void round_to_format_cpu(const kernel::Format& format, const Tensor& x, const Tensor& output);
// Rounds by a given scale of the tensor.
void round_by_tensor_scale_cpu(const kernel::Format& format, const Tensor& x,
                               const kernel::TensorScale& scale, const Tensor& output);
// Rounds to the values of codes, not multiplied by `scale.decode`, or to codes if `output` has
// their dtype.
void encode_operand_cpu(const kernel::Format& format, const Tensor& x,
                        const kernel::TensorScale& scale, const Tensor& output);
Tensor round_to_format_decomposed(const kernel::Format& format, const Tensor& x,
                                  at::ScalarType dtype);

// Rounds the rows of each group as a tensor of their own, on the device only. Rows in no group
// become zeros.
Tensor round_groups_decomposed(const kernel::Format& format, const Tensor& input,
                               const Tensor& splits, at::ScalarType dtype, bool stochastic = false);
// The same with a scale for each group. Also returns the largest magnitude of each, or `nothing`
// for an empty group.
std::tuple<Tensor, Tensor> round_groups_by_scale_decomposed(const kernel::Format& format,
                                                            const Tensor& input,
                                                            const Tensor& scales,
                                                            const Tensor& splits,
                                                            at::ScalarType dtype, double nothing);

// Raises if the format does not support stochastic rounding, as with integers.
const kernel::Format& random_format(const Checks& check, std::string_view name);
// Rounds up or down at random with the right mean. The result of a row depends on `seed` and on the
// row's number; `first_row` is the number of x's first row.
void round_at_random_cpu(const kernel::Format& format, const Tensor& x, uint64_t seed,
                         int64_t first_row, const Tensor& output);
void round_at_random_cpu(const kernel::Format& format, const Tensor& x,
                         const kernel::TensorScale& scale, uint64_t seed, int64_t first_row,
                         const Tensor& output);
// The same with numbers of torch's generator.
Tensor round_at_random_decomposed(const kernel::Format& format, const Tensor& x,
                                  at::ScalarType dtype);

// Turns each 16 rows of a matrix into 16 sums and differences of them. The transform is
// orthonormal, so a product that sums over the rows of two such tensors does not change. Remaining
// rows do not change, either. The result is float32, or float64 for float64. The kernel adds in
// another order than the ATen call.
void turn_columns_cpu(const Tensor& input, const Tensor& output);
Tensor turn_columns(const Tensor& input);
Tensor turn_columns_of_groups(const Tensor& input, const Tensor& splits);

}  // namespace transformer_ops
