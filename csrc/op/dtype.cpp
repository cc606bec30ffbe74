#include "op/dtype.h"

#include <c10/util/Exception.h>

namespace transformer_ops {

at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::Float16:
      return at::kHalf;
    case DType::BFloat16:
      return at::kBFloat16;
    case DType::Float32:
      return at::kFloat;
    case DType::Float64:
      return at::kDouble;
    default:
      TORCH_CHECK(false, "[plan] dtype must be known, got ", to_text(dtype));
  }
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    default:
      return DType::Unknown;
  }
}

}  // namespace transformer_ops
