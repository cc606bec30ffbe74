#include "wrappers/column_sums.h"

#include "kernels/bias.h"
#include "op/typed_op.h"

namespace transformer_ops::cuda {

ColumnSums::ColumnSums(const at::Tensor& like, const at::Tensor& out)
    : rows(rows_of(like)),
      width(out.numel()),
      kernel{cuda::gradient(out), nullptr, column_sum_parts(rows, width)} {
  if (kernel.parts == 1) return;
  partials = empty({kernel.parts, width}, accumulate_dtype(like.scalar_type()), like.device());
  kernel.partials = write(partials);
}

}  // namespace transformer_ops::cuda
