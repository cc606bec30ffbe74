#pragma once

#include <optional>
#include <string>

#include "fuser/analysis.h"
#include "fuser/plan.h"
#include "fuser/rule.h"

namespace transformer_ops {

// A weight gradient that is computed later gets a call of its own, with only the arguments that it
// needs. Its result is a state, and the host runs the call after backward:
//   g1 = grouped_linear_backward(g2, none, s1.splits, s1.weight, none, none, [true, false, ...])
//   st1.delayed_wgrad = grouped_linear_backward(g2, s1.input, s1.splits, none, none, none,
//       [false, true, false, false])
// A gradient that goes into buffers also gets its own call if the op returns lists besides it.
void delay_gradients(const Analysis& analysis, Step& step);

// The reason why no rule of this pass may take these ops: a weight's gradient is computed later.
std::optional<std::string> delayed_gradient(const Match& match, Pass pass);

}  // namespace transformer_ops
