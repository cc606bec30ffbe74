#pragma once

#include <string>
#include <vector>

#include "fuser/analysis.h"
#include "fuser/declaration.h"
#include "fuser/plan.h"
#include "fuser/rewrite.h"

namespace transformer_ops {

// Stops saving main tensors that backward can recompute from tensors that it reads anyway, by ops
// that the policy covers. The first backward step that reads such a tensor recomputes it.
// `forward`: the groups of the forward steps.
void recompute_outputs(Plan& plan, const Analysis& analysis, const std::vector<StepGroup>& forward);

// Is it what a recomputation may read of an op besides its input: a slot, a parameter, an extra
// input or an attribute?
bool has_field(const OpDeclaration& op, const std::string& name);

// Do the attributes ask for recomputation, whatever the policy says?
bool asks_for_recompute(const Attributes& attributes);

}  // namespace transformer_ops
