#pragma once

#include <vector>

#include "executor/program.h"
#include "fuser/plan_key.h"

namespace transformer_ops {

// The plan of the same ops without fusions, for its tensors, in order.
Plan unfused_plan(const Plan& plan, const std::vector<TensorMeta>& tensors);

}  // namespace transformer_ops
