// What a declaration need not say, since it follows from the rest.
#pragma once

#include "fuser/declaration.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises where a function is not what the schema says. One result without a shape rule is like the
// first tensor, which has a compute dtype.
void complete(TypedOp& op);

// <op>_backward(Tensor grad_output, ARGUMENTS OF FORWARD) -> (Tensor grad_input, ...), by the
// derivative of forward's decomposition. Raises where that reads a tensor which no slot keeps.
TypedOp default_backward(const OpDeclaration& declaration, const TypedOp& forward);

}  // namespace transformer_ops
