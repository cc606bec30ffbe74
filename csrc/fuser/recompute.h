#pragma once

#include <vector>

#include "fuser/analysis.h"
#include "fuser/plan.h"
#include "fuser/rewrite.h"

namespace transformer_ops {

// Stops saving main tensors that backward can recompute from tensors that it reads anyway, by ops
// that the policy covers. The first backward step that reads such a tensor recomputes it.
// `forward`: the groups of the forward steps.
void recompute_outputs(Plan& plan, const Analysis& analysis, const std::vector<StepGroup>& forward);

// Do the attributes ask for recomputation, whatever the policy says?
bool asks_for_recompute(const Attributes& attributes);

}  // namespace transformer_ops
