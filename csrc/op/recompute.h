// What backward recomputes from saved tensors: cheap outputs, by typed ops "recompute_<op>", and
// operands that are rounded again, by "<op>.saved". Their first argument is the gradient of the
// step that reads the result. Its values are not read, but torch.compile can then neither merge the
// call with forward nor save its result there.
#pragma once

#include <optional>

#include "op/typed_op.h"

namespace transformer_ops {

// Makes the recompute op of a forward op; all its arguments must be available in backward.
TypedOp recompute_by(TypedOp forward);

// Makes <op>.saved(Tensor grad_output, ...). Returns none if the op is differentiable.
std::optional<TypedOp> saved_form(const TypedOp& op);

}  // namespace transformer_ops
