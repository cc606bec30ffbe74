#pragma once

#include "fuser/plan.h"
#include "op/run_call.h"

namespace transformer_ops {

// Runs a typed op, or one of torch's own. Throws c10::Error (RuntimeError) where there is none.
Callee find_op(const std::string& name);

// Throws c10::Error where a call does not fit the schema of its op: in a text that was made for
// another release, or by hand. Calls that the host language runs are left out.
void check_calls(const Plan& plan);

}  // namespace transformer_ops
