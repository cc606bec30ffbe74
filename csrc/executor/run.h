#pragma once

#include "executor/program.h"

namespace transformer_ops {

// Runs a program on the main input, the caller's extra inputs and the parameters, in plan order;
// returns the main output, then the visible extra outputs. Differentiable by one autograd node, for
// whichever of the tensors require a gradient;
// under torch.func transforms through the unfused meaning of every op instead.
Tensors run(const SharedProgram& program, at::TensorList tensors);

}  // namespace transformer_ops
