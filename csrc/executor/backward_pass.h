// Which backward pass is running: what overwrites a buffer writes once in each.
#pragma once

#include <cstdint>

namespace transformer_ops {

// The number of the pass that this thread runs; 0 outside of any. A pass that runs inside another,
// as those of reentrant checkpoints do, counts as the outer one: a call in the outer one, such as
// that of a checkpointed forward, tells that it runs. Cheap outside of any.
uint64_t current_backward_pass();

}  // namespace transformer_ops
