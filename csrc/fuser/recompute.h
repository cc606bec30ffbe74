#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// A main tensor that backward reads, and that a cheap producer can compute again from what backward
// reads anyway, is no longer saved: the first backward step that reads it computes it again.
// `dtypes`: of the main tensor at each boundary.
void recompute_cheap_outputs(Plan& plan, const std::vector<DType>& dtypes);

}  // namespace transformer_ops
