#pragma once

#include "executor/program.h"

namespace transformer_ops {

// A call as run_call takes it (op/run_call.h): its constants, and where its tensors stand.
c10::IValue call_text(const Program::Call& call);

}  // namespace transformer_ops
