// Calls whose results depend on weights alone: where weights are frozen, they run once.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>

#include "executor/frozen_weights.h"
#include "executor/program.h"

namespace transformer_ops {

// Where all that the call reads is one parameter, which may be a list, states and constants.
// `origin` gives the parameter that a slot holds.
std::optional<WeightCache::Call> weight_cache_key(const Plan& plan, const Instruction& instruction,
                                                  const Program::Call& call,
                                                  c10::function_ref<Value(const Value&)> origin);

}  // namespace transformer_ops
