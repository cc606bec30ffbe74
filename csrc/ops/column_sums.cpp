#include "ops/column_sums.h"

#include "ops/typed_op.h"

namespace transformer_ops::cuda {

ColumnSums::ColumnSums(const at::Tensor& like, const at::Tensor& out)
    : rows(rows_of(like)), width(out.numel()) {
  const int64_t parts = kernels().column_sum_parts(rows, width);
  kernel = {.out = gradient(out), .partials = nullptr, .parts = parts};
  if (parts == 1) return;
  partials = empty({parts, width}, accumulate_dtype(like.scalar_type()), like.device());
  kernel.partials = write(partials);
}

}  // namespace transformer_ops::cuda
