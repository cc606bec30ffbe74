#include "wrappers/product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

#include "kernels/cpu.h"
#include "op/buffer.h"
#include "wrappers/widened_product.h"

namespace at::native {
// oneDNN's product, result = beta result + alpha left right. libtorch_cpu exports it, but no
// installed header declares it. It is null if a build of torch does not have it.
__attribute__((weak)) void mkldnn_matmul(const Tensor& left, const Tensor& right,
                                         const Tensor& result, float beta, float alpha);
}  // namespace at::native

namespace transformer_ops {
namespace {

using at::Tensor;

Tensor strided(const Tensor& matrix, int64_t rows, int64_t columns, int64_t row_stride,
               int64_t column_stride, int64_t first) {
  const int64_t sizes[] = {rows, columns};
  const int64_t strides[] = {row_stride, column_stride};
  return at::native::as_strided_tensorimpl(matrix, sizes, strides, matrix.storage_offset() + first);
}

// PyTorch raises if it cannot determine what the processor has.
bool onednn_multiplies() {
  try {
    const Tensor factor = empty_cpu({8, 8}, at::kFloat), out = empty_cpu({8, 8}, at::kFloat);
    std::fill_n(factor.mutable_data_ptr<float>(), 64, 1.0f);
    at::native::mkldnn_matmul(factor, factor, out, /*beta=*/0, /*alpha=*/1);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Does oneDNN multiply float32 faster than MKL, which at::mm calls?
bool prefers_onednn() {
  return cpu::processor().prefers_onednn && at::native::mkldnn_matmul != nullptr &&
         at::hasMKLDNN() && onednn_multiplies();
}

// Is it stored by rows or by columns, without gaps? PyTorch copies others before it calls oneDNN.
bool is_dense(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  return (matrix.stride(1) == 1 && matrix.stride(0) == columns) ||
         (matrix.stride(0) == 1 && matrix.stride(1) == rows);
}

// Measured with 1 and 2 threads, oneDNN took 0.17 to 0.97 of MKL's time for all products this
// large, and 0.84 to 0.97 for those of a large block. Errors are up to 2.3 times MKL's
// (benchmarks/products.py). Smaller products do not pay for its call, which takes 14 us longer, and
// for the kernel of each new shape, which takes 0.4 ms.
bool is_work_for_onednn(at::ScalarType dtype, int64_t multiplications) {
  static const bool preferred = prefers_onednn();
  constexpr int64_t kLeastWork = int64_t{1} << 24;
  return preferred && dtype == at::kFloat && multiplications >= kLeastWork &&
         at::globalContext().userEnabledMkldnn();
}

bool is_for_onednn(const Tensor& out, const Tensor& left, const Tensor& right) {
  constexpr int64_t kLeastSize = 8;
  const int64_t rows = left.size(0), inner = left.size(1), columns = right.size(1);
  return is_work_for_onednn(left.scalar_type(), rows * inner * columns) &&
         std::min({rows, inner, columns}) >= kLeastSize && out.stride(1) == 1 && is_dense(right);
}

// Is it stored by rows or by columns, with gaps, as some columns of a larger matrix are?
bool has_gaps(const Tensor& matrix) {
  return !is_dense(matrix) && (matrix.stride(1) == 1 || matrix.stride(0) == 1);
}

// A copy without gaps, stored by rows or by columns as before.
Tensor without_gaps(const Tensor& matrix) {
  const bool by_columns = matrix.stride(0) == 1 && matrix.stride(1) != 1;
  const Tensor rows = by_columns ? transposed(matrix) : matrix;
  const Tensor copy = empty_cpu(rows.sizes(), rows.scalar_type());
  copy.copy_(rows);
  return by_columns ? transposed(copy) : copy;
}

void multiply_whole(const Tensor& out, const Tensor& left, const Tensor& right, double beta,
                    double scale) {
  // oneDNN with a scale was not measured.
  if (scale == 1 && is_for_onednn(out, left, right) && is_dense(left)) {
    at::native::mkldnn_matmul(left, right, out, static_cast<float>(beta), /*alpha=*/1);
    return;
  }
  Tensor sum = out;
  if (beta == 0 && scale == 1) {
    at::cpu::mm_out(sum, left, right);
  } else {
    at::cpu::addmm_(sum, left, right, beta, scale);
  }
}

// The number of rows of `left` that a product takes at a time. oneDNN adds up bfloat16 products of
// this size in a buffer of 1.4 to 2.9 MB besides the result. With 512 rows at a time it needs none,
// in 0.95 to 0.99 of the time (1024 to 4096 rows, 256 to 4096 columns). Other sizes and layouts
// took longer in parts.
int64_t rows_at_once(const Tensor& left) {
  const int64_t rows = left.size(0), inner = left.size(1);
  const bool in_parts =
      left.scalar_type() == at::kBFloat16 && left.stride(1) == 1 && rows >= 1024 && inner >= 4096;
  return in_parts ? 512 : rows;
}

}  // namespace

Tensor transposed(const Tensor& matrix) {
  return strided(matrix, matrix.size(1), matrix.size(0), matrix.stride(1), matrix.stride(0), 0);
}

Tensor rows_of(const Tensor& matrix, int64_t first, int64_t count) {
  const int64_t stride = matrix.stride(0);
  return strided(matrix, count, matrix.size(1), stride, matrix.stride(1), first * stride);
}

Tensor columns_of(const Tensor& matrix, int64_t first, int64_t count) {
  const int64_t stride = matrix.stride(1);
  return strided(matrix, matrix.size(0), count, matrix.stride(0), stride, first * stride);
}

Tensor matrix_of(const Tensor& stack, int64_t index) {
  return strided(stack, stack.size(1), stack.size(2), stack.stride(1), stack.stride(2),
                 index * stack.stride(0));
}

bool may_compile_kernel(at::ScalarType dtype, int64_t multiplications) {
  return c10::elementSize(dtype) == 2 || is_work_for_onednn(dtype, multiplications);
}

void multiply_cpu(const Tensor& out, const Tensor& left, const Tensor& right, double beta,
                  double scale) {
  if (is_widened(left, right)) return multiply_widened(out, left, right, beta, scale);
  // Copies of this many rows and oneDNN together took 0.87 to 0.99 of MKL's time.
  constexpr int64_t kRowsOfCopy = 512;
  const bool copies = scale == 1 && is_for_onednn(out, left, right) && has_gaps(left);
  const int64_t rows = left.size(0), part = copies ? kRowsOfCopy : rows_at_once(left);
  if (!copies && part == rows) return multiply_whole(out, left, right, beta, scale);
  for (int64_t first = 0; first < rows; first += part) {
    const int64_t count = std::min(part, rows - first);
    const Tensor rows_of_left = rows_of(left, first, count);
    multiply_whole(rows_of(out, first, count), copies ? without_gaps(rows_of_left) : rows_of_left,
                   right, beta, scale);
  }
}

}  // namespace transformer_ops
