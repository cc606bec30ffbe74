#pragma once

#include "executor/host.h"
#include "executor/program.h"

namespace transformer_ops {

// Runs a program on the main input, the caller's extra inputs and the parameters, in plan order.
// Returns the main output, then the visible extra outputs. One autograd node makes it
// differentiable in all tensors that require a gradient. Under torch.func transforms, the ops run
// by their decompositions instead.
// `host` runs the steps that are not native, and knows the buffers of weights that accumulate.
// Without it, as for the text of a plan, autograd gets the gradients of those weights.
Tensors run(const SharedProgram& program, at::TensorList tensors, const SharedHostCall& host = {});

// The same for the text of a plan. A trace records one op for each pass instead of the typed ops,
// if the plan and the way of the trace allow it (executor/pass_ops.h).
Tensors run_recorded(std::string_view text, at::TensorList tensors);

// The same by the decomposition of every op, in plain ATen calls that autograd tracks. Throws if
// steps are not native, and under a recipe.
Tensors run_decomposed(const SharedProgram& program, at::TensorList tensors, const char* what);

// Throws unless the program has only native steps: "[Sequential] <rule>, got the Python steps ...".
void refuse_host_steps(const Program& program, const char* rule);
// Throws if forward saves codes instead of the tensors whose derivatives `what` needs.
void refuse_saved_codes(const Program& program, const char* what);

}  // namespace transformer_ops
