#pragma once

#include "executor/program.h"

namespace transformer_ops {

// The text of a call as run_call reads it (op/run_call.h): its constants, and the positions of its
// tensors.
c10::IValue call_text(const Program::Call& call);

}  // namespace transformer_ops
