#include "bodies/norm_cuda.h"

#include "kernels/norm.h"
#include "op/typed_op.h"

namespace transformer_ops::cuda {

void run_norm_backward(const at::Tensor& x, NormBackward norm) {
  at::Tensor partials;
  const int wanted = (norm.grad_gamma.data != nullptr) + (norm.grad_beta.data != nullptr);
  if (wanted > 0) {
    norm.parts = norm_backward_parts(norm.rows, norm.h);
    partials = empty({norm.parts, wanted, norm.h}, accumulate_dtype(x.scalar_type()), x.device());
    norm.partials = write(partials);
  }
  norm_backward(stream_of(x), norm);
}

}  // namespace transformer_ops::cuda
