#pragma once

#include "ops/typed_op.h"

namespace transformer_ops {

// One number per element of the last dimension, in the gradient's dtype.
TensorSpec bias_gradient(const Tensor& grad_output);

}  // namespace transformer_ops
