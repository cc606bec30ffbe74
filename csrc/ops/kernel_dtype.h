#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/types.h"

namespace transformer_ops {

// Of a tensor whose dtype a shape rule has checked.
kernel::DType kernel_dtype(const at::Tensor& tensor);

}  // namespace transformer_ops
