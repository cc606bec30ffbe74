// The parts of a declaration that follow from the rest, so that it may omit them.
#pragma once

#include "fuser/declaration.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Completes an op's declaration and raises if a function does not match the schema. Without a shape
// rule, the one result is like the first tensor, which must have a compute dtype.
void complete(TypedOp& op);

// Makes <op>_backward(Tensor grad_output, ARGUMENTS OF FORWARD) -> (Tensor grad_input, ...) from
// the derivative of forward's decomposition. Raises if it reads a tensor that no slot saves.
TypedOp default_backward(const OpDeclaration& declaration, const TypedOp& forward);

}  // namespace transformer_ops
