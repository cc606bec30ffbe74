// Identifies the backward pass that is running, because a buffer is overwritten once in each pass.
#pragma once

#include <cstdint>

namespace transformer_ops {

// The number of the backward pass that this thread runs; 0 outside of any. A pass inside another,
// as with reentrant checkpoints, counts as the outer one, which is known from an earlier call in it
// (such as that of a checkpointed forward). A call outside of any pass is cheap.
uint64_t current_backward_pass();

}  // namespace transformer_ops
