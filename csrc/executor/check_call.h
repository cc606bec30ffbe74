#pragma once

#include "fuser/plan.h"
#include "op/run_call.h"

namespace transformer_ops {

// The typed op or torch op of this name. Throws c10::Error (RuntimeError) if there is none.
Callee find_op(const std::string& name);

// Throws c10::Error if a call does not fit its op's schema. Plans from another release or written
// by hand may have such calls. Calls that the host language runs are not checked.
void check_calls(const Plan& plan);

}  // namespace transformer_ops
