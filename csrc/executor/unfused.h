#pragma once

#include <vector>

#include "executor/program.h"
#include "fuser/facts.h"

namespace transformer_ops {

// The plan of the same ops without fusions. `facts` are those of the plan's tensors, in order.
Plan unfused_plan(const Plan& plan, const std::vector<TensorFacts>& facts);

}  // namespace transformer_ops
