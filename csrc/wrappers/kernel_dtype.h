#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/types.h"

namespace transformer_ops {

// The kernels' name for a dtype that a shape rule has checked.
kernel::DType kernel_dtype(at::ScalarType dtype);
inline kernel::DType kernel_dtype(const at::Tensor& tensor) {
  return kernel_dtype(tensor.scalar_type());
}

}  // namespace transformer_ops
