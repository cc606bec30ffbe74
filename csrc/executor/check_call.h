#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "fuser/plan.h"

namespace transformer_ops {

// Raises where a call does not fit the schema of its op: a text that was made for another release,
// or by hand.
void check_call(const Instruction& instruction, const c10::OperatorHandle& op);

}  // namespace transformer_ops
