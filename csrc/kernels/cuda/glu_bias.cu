// The gradient of a gated linear unit and, summed over rows, of the bias before it.
#include "kernels/cuda/glu.h"

namespace transformer_ops::cuda {
namespace {

namespace entry {

void glu_bias_backward(Stream stream, const Glu& glu, DType dtype, const void* grad_y,
                       const void* x, void* grad_x, const ColumnSum& sum, int64_t rows, int64_t h) {
  with_glu_backward(glu, dtype, grad_y, x, grad_x, h, [&](const auto& body, int64_t packs) {
    for_columns(stream, body, sum, rows, packs, 2 * h);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(glu_bias_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
