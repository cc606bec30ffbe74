// Code shared by the ops that round to the numbers of a format.
#pragma once

#include <algorithm>
#include <optional>

#include "wrappers/cpu.h"
#include "wrappers/grouped.h"
#include "wrappers/quantized.h"

namespace transformer_ops {

inline int64_t row_bytes(const kernel::Format& format, int64_t h) {
  return (h * format.bits + 7) / 8;
}

inline char* bytes_at(const Tensor& tensor, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes;
}

inline char* element_at(const Tensor& tensor, int64_t i) {
  return bytes_at(tensor, i * static_cast<int64_t>(tensor.element_size()));
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

// Calls each(matrix of input, matrix of output, index, number of its first row) for each group that
// has rows; rows that are in no group become zeros.
template <typename Each>
void group_by_group_cpu(const Checks& check, const Tensors& input, const Tensor* splits,
                        const Tensors& output, const Each& each) {
  const RoundedGroups x = rounded_groups(check, input, splits);
  const RoundedGroups y = rounded_groups(check, output, splits);
  int64_t first = 0;
  for (size_t i = 0; i < x.matrices.size(); ++i) {
    const int64_t count = x.matrices[i].size(0);
    if (count > 0) each(x.matrices[i], y.matrices[i], i, first);
    first += count;
  }
  if (y.rest.defined()) y.rest.zero_();
}

// Rounds by a scale of the tensor; with a seed, up or down at random with the right mean. The
// result of a row then depends on the seed and on the row's number; `first_row` is the number of
// x's first row.
void round_cpu(const kernel::Format& format, const Tensor& x, const kernel::TensorScale& scale,
               const Tensor& output, std::optional<uint64_t> seed = {}, int64_t first_row = 0);
// The same to the values of codes, which a later product multiplies by `scale.decode`, or to codes
// if `output` has their dtype.
void encode_operand_cpu(const kernel::Format& format, const Tensor& x, kernel::TensorScale scale,
                        const Tensor& output, std::optional<uint64_t> seed = {});
// `stochastic` draws numbers of torch's generator.
Tensor round_decomposed(const kernel::Format& format, const Tensor& x, at::ScalarType dtype,
                        bool stochastic);

// Rounds the rows of each group as a tensor of their own, on the device only. Rows in no group
// become zeros.
Tensor round_groups_decomposed(const kernel::Format& format, const Tensor& input,
                               const Tensor& splits, at::ScalarType dtype, bool stochastic);
// The same with a scale for each group. Also returns the largest magnitude of each, or `nothing`
// for an empty group.
std::tuple<Tensor, Tensor> round_groups_by_scale_decomposed(const kernel::Format& format,
                                                            const Tensor& input,
                                                            const Tensor& scales,
                                                            const Tensor& splits,
                                                            at::ScalarType dtype, double nothing);

}  // namespace transformer_ops
