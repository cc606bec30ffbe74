#pragma once

#include <map>
#include <vector>

#include "executor/program.h"
#include "fuser/facts.h"
#include "ops/unfused.h"

namespace transformer_ops {

// The plan of the same ops without fusions. `facts` are those of the plan's tensors, in order.
Plan unfused_plan(const Plan& plan, const std::vector<TensorFacts>& facts);

// Runs a forward step through unfused bodies. `values` holds what it reads and takes its results.
void run_unfused_step(const Step& step, std::map<Value, Tensor>& values);

}  // namespace transformer_ops
