// What backward recomputes from saved tensors: cheap outputs, by typed ops "recompute_<op>", and
// operands that are rounded again, by "<op>_saved". Their first argument is the gradient of the
// step that reads the result. Its values are not read, but torch.compile can then neither merge the
// call with forward nor save its result there.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// Makes the recompute op of a forward op; all its arguments must be available in backward.
TypedOp recompute_by(TypedOp forward);

// Registers a typed op and <name>_saved(Tensor grad_output, ...). The latter may omit the last
// result, a tensor; kernel wrappers then get an undefined one.
enum class LastResult : uint8_t { InBoth, InForward };
void register_for_both_passes(const TypedOp& op, LastResult last = LastResult::InBoth);
// The same for an op that only plans call.
void register_plan_op_for_both_passes(const TypedOp& op, LastResult last = LastResult::InBoth);

}  // namespace transformer_ops
