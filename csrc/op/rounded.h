// Ops that round their first result on the way: what a product under a recipe takes is written by
// the op that makes it, while the rows are in the caches.
#pragma once

#include <optional>
#include <string_view>

#include "op/typed_op.h"

namespace transformer_ops {

// <op>.rounded and <op>.rounded_by (op/row_rounding.h): `suffix` is what stands behind the op. The
// results are, bit for bit, those that a call of its own makes of what <op> gives. None where the
// declaration of the op does not say .by_rows, and for another suffix.
std::optional<TypedOp> rounded_by(const TypedOp& op, std::string_view suffix);

// Raises where .by_rows names no tensor arguments, or the op gives lists.
void check_by_rows(const TypedOp& op);

}  // namespace transformer_ops
