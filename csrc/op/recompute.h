// What backward computes again from tensors that forward saved: cheap outputs, by typed ops
// "recompute_<op>", and operands rounded again, by "<op>_saved". Their first argument is the
// gradient that the reading step is given. They do not read its values: with it, torch.compile
// neither merges them with forward nor saves their result there.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// That of a forward whose arguments are all there in backward.
TypedOp recompute_by(TypedOp forward);

// Registers a typed op, and <name>_saved(Tensor grad_output, ...) beside it. That may lack the last
// result, a tensor: bodies see it undefined then.
enum class LastResult : uint8_t { InBoth, InForward };
void register_for_both_passes(const TypedOp& op, LastResult last = LastResult::InBoth);

}  // namespace transformer_ops
