#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// A main tensor that backward reads, and that a cheap producer can compute again from what backward
// reads anyway, is no longer saved: the first backward step that reads it computes it again.
// `dtypes`: of the main tensor at each boundary. Without `all` only the producers that ask for it.
void recompute_cheap_outputs(Plan& plan, const std::vector<DType>& dtypes, bool all);

// Is the op's output to be computed again whatever the policy says?
bool asks_for_recompute(const Attributes& attributes);

}  // namespace transformer_ops
