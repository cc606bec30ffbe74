#include "wrappers/widened_product.h"

#include <ATen/Context.h>

#include <algorithm>

#include "kernels/cpu.h"
#include "op/buffer.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

using at::Tensor;

// The size of a block of the result, and of each operand: at most 8 MiB in float32. With AVX2,
// bfloat16 products of 512 to 4096 rows took 0.99 (one thread) and 1.04 (two) of the time of whole
// operands, in the geometric mean on a machine under load.
constexpr int64_t kRows = 1024, kColumns = 1024, kInner = 512;

// A float32 copy, stored by rows or by columns as before.
Tensor widened(const Tensor& matrix) {
  const bool by_columns = matrix.stride(0) == 1 && matrix.stride(1) != 1;
  const Tensor rows = by_columns ? transposed(matrix) : matrix;
  const Tensor wide = empty_cpu(rows.sizes(), at::kFloat);
  wide.copy_(rows);
  return by_columns ? transposed(wide) : wide;
}

// The columns of a result that are in one block.
void multiply_columns(const Tensor& out, const Tensor& left, const Tensor& right, double beta,
                      double scale) {
  const int64_t rows = left.size(0), inner = left.size(1);
  Tensor factor;
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t count = std::min(kRows, rows - row);
    const Tensor part = rows_of(out, row, count), operand = rows_of(left, row, count);
    const Tensor sum = beta == 0 ? empty_cpu(part.sizes(), at::kFloat) : widened(part);
    int64_t first = 0;
    do {  // runs once even if there is nothing to add up
      const int64_t terms = std::min(kInner, inner - first);
      if (!factor.defined() || inner > kInner) {
        factor.reset();  // its memory is reused for the next one
        factor = widened(rows_of(right, first, terms));
      }
      multiply_cpu(sum, widened(columns_of(operand, first, terms)), factor, first == 0 ? beta : 1,
                   scale);
      first += terms;
    } while (first < inner);
    part.copy_(sum);
  }
}

}  // namespace

bool is_widened(const Tensor& left, const Tensor& right) {
  const auto dtype = left.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  const bool is_half = dtype == at::kHalf;
  const cpu::Processor& processor = cpu::processor();
  const bool onednn = at::globalContext().userEnabledMkldnn();
  if (onednn && (is_half ? processor.multiplies_half : processor.multiplies_bfloat16)) return false;
  const int64_t rows = left.size(0);
  // oneDNN's emulation took 2 to 4.5 times as long as float32 for 64 rows and more, and less for 8.
  if (onednn && !is_half && processor.onednn_emulates_bfloat16) return rows >= 32;
  // Each number of a large matrix is read once or twice: PyTorch's dot products took 0.2 to 0.8 of
  // the time. Its loops for more rows took 3 to 60 times as long.
  const bool dots = left.stride(1) == 1 && right.stride(0) == 1;
  return rows > 2 || !dots || (is_half && !processor.converts_half);
}

void multiply_widened(const Tensor& out, const Tensor& left, const Tensor& right, double beta,
                      double scale) {
  const int64_t columns = right.size(1);
  for (int64_t first = 0; first < columns; first += kColumns) {
    const int64_t count = std::min(kColumns, columns - first);
    multiply_columns(columns_of(out, first, count), left, columns_of(right, first, count), beta,
                     scale);
  }
}

}  // namespace transformer_ops
