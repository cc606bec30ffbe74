#pragma once

#include "executor/host.h"
#include "executor/program.h"

namespace transformer_ops {

// Runs a program on the main input, the caller's extra inputs and the parameters, in plan order;
// returns the main output, then the visible extra outputs. Differentiable by one autograd node, for
// whichever of the tensors require a gradient;
// under torch.func transforms through the decomposition of every op instead.
// `host`: runs the steps that are not native, and knows where weights accumulate; without one, as
// for the text of a plan, autograd gets the gradients of those weights.
Tensors run(const SharedProgram& program, at::TensorList tensors, const SharedHostCall& host = {});

// The same by the decomposition of every op: plain ATen calls, which autograd follows. Throws
// where steps are not native, and under a recipe.
Tensors run_decomposed(const SharedProgram& program, at::TensorList tensors, const char* what);

// Throws unless the program has native steps only: "[Sequential] <rule>, got the Python steps ...".
void refuse_host_steps(const Program& program, const char* rule);
// Throws where forward keeps codes instead of the tensors themselves, whose derivatives `what`
// needs.
void refuse_saved_codes(const Program& program, const char* what);

}  // namespace transformer_ops
