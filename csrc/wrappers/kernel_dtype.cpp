#include "wrappers/kernel_dtype.h"

namespace transformer_ops {

kernel::DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernel::DType::Float32;
    case at::kDouble:
      return kernel::DType::Float64;
    case at::kHalf:
      return kernel::DType::Float16;
    case at::kBFloat16:
      return kernel::DType::BFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "a shape rule checks the dtype first");
  }
}

}  // namespace transformer_ops
