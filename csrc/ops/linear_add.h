// A product and a residual, for the fused ops that have both.
#pragma once

#include "ops/typed_op.h"

namespace transformer_ops {

// scale x W^T [+ b] + extra, all of one dtype; `extra` has the result's shape.
Tensor linear_add_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& extra, double scale = 1.0);

}  // namespace transformer_ops
