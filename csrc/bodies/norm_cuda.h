// What the CUDA bodies of norms share.
#pragma once

#include "bodies/cuda.h"
#include "kernels/norm.h"

namespace transformer_ops::cuda {

// The backward of a norm whose input is `x`, with memory for its sums over rows.
void run_norm_backward(const at::Tensor& x, NormBackward norm);

}  // namespace transformer_ops::cuda
