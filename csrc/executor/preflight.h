#pragma once

#include "executor/program.h"

namespace transformer_ops {

// For a program that draws random numbers: raises any errors of its steps for these tensors on the
// meta device, before torch's generator is used. Remembers the sizes and dtypes that passed last.
void preflight(const Program& program, at::TensorList tensors);

}  // namespace transformer_ops
