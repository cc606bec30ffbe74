#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// Stops saving main tensors that backward can recompute: a cheap op must compute them from tensors
// that backward reads anyway. The first backward step that reads one recomputes it. `dtypes`: those
// of the main tensor at each boundary. Without `all`, only for ops that ask for it.
void recompute_cheap_outputs(Plan& plan, const std::vector<DType>& dtypes, bool all);

// Do the attributes ask for recomputation, whatever the policy says?
bool asks_for_recompute(const Attributes& attributes);

}  // namespace transformer_ops
