// Finds calls whose results depend only on weights: they run once while weights are frozen.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>

#include "executor/frozen_weights.h"
#include "executor/program.h"

namespace transformer_ops {

// The key of a call that reads only one parameter (or a list), states and constants; none for other
// calls. `origin` returns the parameter that a slot saves.
std::optional<WeightCache::Call> weight_cache_key(const Plan& plan, const Instruction& instruction,
                                                  const Program::Call& call,
                                                  c10::function_ref<Value(const Value&)> origin);

}  // namespace transformer_ops
