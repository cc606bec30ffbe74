// hadamard_columns turns each 16 rows into 16 sums and differences of them, in float32. The
// transform is orthonormal, so a product that sums over the rows of two such tensors does not
// change. Remaining rows do not change, either. With splits each group of rows is transformed by
// itself.
#include "kernels/hadamard.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>

#include "kernels/quantize.h"
#include "op/op.h"
#include "quantization/rounding.h"
#include "wrappers/group_bands.h"
#include "wrappers/linear.h"

namespace transformer_ops::ops::hadamard_columns {
namespace {

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

TensorSpecs turned_shape(const Checks& check, const Tensor&, const Tensor& input,
                         const Tensor* splits) {
  check.compute_dtype("input", input);
  if (splits != nullptr) check_rounded_groups(check, {input}, splits);
  return {like(input, accumulate_dtype(input.scalar_type()))};
}

// The kernel adds in another order than the decomposition.
void turn(const Tensor& input, const Tensor& output) {
  const FlatRows shape(input.sizes());
  const int64_t blocks = (shape.rows + kHadamardRows - 1) / kHadamardRows;
  cpu::parallel(blocks, kHadamardRows * shape.h, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kHadamardRows;
    const int64_t last = std::min(end * kHadamardRows, shape.rows);
    cpu::hadamard_rows(kernel_dtype(input), element_at(input, first * shape.h),
                       element_at(output, first * shape.h), last - first, shape.h);
  });
}

void turned_cpu(const Checks& check, const Tensor&, const Tensor& input, const Tensor* splits,
                Tensor& output) {
  if (splits == nullptr) return turn(input, output);
  group_by_group_cpu(check, {input}, splits, {output},
                     [](const Tensor& x, const Tensor& y, size_t, int64_t) { turn(x, y); });
}

Tensor turned_decomposition(const Tensor&, const Tensor& input, const Tensor* splits) {
  const Tensor x = to_accumulate(input), rows = x.dim() == 0 ? x.reshape({1, 1}) : as_matrix(x);
  if (splits != nullptr) {
    const GroupBands bands(*splits, rows.sym_size(0), kHadamardRows);
    const Tensor turned = bands.take_back_whole(turn_blocks(bands.lay_out(rows)), rows);
    return turned.reshape_symint(x.sym_sizes());
  }
  const c10::SymInt whole = rows.sym_size(0) / kHadamardRows * kHadamardRows;
  const Tensor turned = turn_blocks(rows.slice_symint(0, 0, whole));
  return at::cat({turned, rows.slice_symint(0, whole)}).reshape_symint(x.sym_sizes());
}

[[maybe_unused]] const bool registered = [] {
  register_typed_op({.schema = "hadamard_columns(Tensor grad_output, Tensor input, "
                               "Tensor? splits=None) -> Tensor output",
                     .shape = turned_shape,
                     .bodies = {turned_cpu, turned_decomposition, turned_decomposition},
                     .reads_first = false,
                     .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::hadamard_columns
