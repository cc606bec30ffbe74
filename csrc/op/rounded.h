// Ops that round their first result on the way: what a product under a recipe takes is written by
// the op that makes it, while the rows are in the caches.
#pragma once

#include <vector>

#include "op/typed_op.h"

namespace transformer_ops {

// <op>_rounded and <op>_rounded_scaled (op/row_rounding.h) of an op whose declaration says
// .by_rows; none of others. The results are, bit for bit, those that a call of its own makes of
// what <op> gives.
std::vector<TypedOp> rounded_by(const TypedOp& op);

}  // namespace transformer_ops
