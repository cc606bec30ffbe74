// The dtypes of plans as torch has them.
#pragma once

#include <c10/core/ScalarType.h>

#include "fuser/dtype.h"

namespace transformer_ops {

// Raises for an unknown one.
at::ScalarType to_torch(DType dtype);
// Unknown for one that no op computes in.
DType to_dtype(at::ScalarType dtype);

}  // namespace transformer_ops
