#pragma once

#include "fuser/analysis.h"
#include "fuser/plan.h"

namespace transformer_ops {

// Stops saving main tensors that backward can recompute from tensors that it reads anyway, by ops
// that the policy covers. The first backward step that reads such a tensor recomputes it.
void recompute_outputs(Plan& plan, const Analysis& analysis);

// Do the attributes ask for recomputation, whatever the policy says?
bool asks_for_recompute(const Attributes& attributes);

}  // namespace transformer_ops
