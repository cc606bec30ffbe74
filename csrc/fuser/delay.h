#pragma once

#include <optional>
#include <string>

#include "fuser/analysis.h"
#include "fuser/plan.h"
#include "fuser/rule.h"

namespace transformer_ops {

// A weight's gradient that is left for later has a call of its own, which takes no more than it
// needs; what it gives is a state, and the host runs it after backward:
//   g1 = grouped_linear_backward(g2, none, s1.splits, s1.weight, none, none, [true, false, ...])
//   st1.delayed_wgrad = grouped_linear_backward(g2, s1.input, s1.splits, none, none, none,
//       [false, true, false, false])
// What goes into buffers has one too, where the op gives lists beside it.
void delay_gradients(const Analysis& analysis, Step& step);

// Why no rule of this pass may take these ops: the gradient of one's weight is left for later.
std::optional<std::string> delayed_gradient(const Match& match, Pass pass);

}  // namespace transformer_ops
