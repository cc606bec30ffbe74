#pragma once

#include "executor/program.h"

namespace transformer_ops {

// For a program that draws random numbers: raises what its steps would raise for these tensors, on
// the meta device, before torch's generator has moved. Remembers the sizes and dtypes that passed
// last.
void preflight(const Program& program, at::TensorList tensors);

}  // namespace transformer_ops
