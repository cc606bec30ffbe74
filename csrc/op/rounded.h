// An op that rounds its first result to a format on the way: what a product under a recipe takes is
// written by the op that makes it, while the rows are in the caches.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// "<op>_rounded"
std::string rounded_name(const std::string& name);

// <op>_rounded(..., str format, str column_format) -> (..., Tensor <first result>_columns), of an
// op whose declaration says .by_rows. The first result holds numbers of `format`, bit for bit those
// that quantize_dequantize makes of what <op> gives. The last result is the same of
// `column_format`; without one it has no elements.
TypedOp rounded_by(const TypedOp& op);

}  // namespace transformer_ops
