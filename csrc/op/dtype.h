// Conversion between plan dtypes and torch dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include "fuser/dtype.h"

namespace transformer_ops {

// Raises if the dtype is unknown.
at::ScalarType to_torch(DType dtype);
// Returns Unknown for a dtype that no op computes in.
DType to_dtype(at::ScalarType dtype);

}  // namespace transformer_ops
