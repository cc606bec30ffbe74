// Ops that also round their first result. The op that computes the operand of a product under a
// recipe rounds it while its rows are in the caches.
#pragma once

#include <optional>
#include <string_view>

#include "op/typed_op.h"

namespace transformer_ops {

// Makes <op>.rounded or <op>.rounded_by (op/row_rounding.h); `suffix` is the part after the op's
// name. The results are bitwise those of a separate rounding call on the results of <op>. Returns
// none if the op's declaration does not set .by_rows, or for another suffix.
std::optional<TypedOp> rounded_by(const TypedOp& op, std::string_view suffix);

// Raises if .by_rows names something other than tensor arguments, or if the op has list results.
void check_by_rows(const TypedOp& op);

}  // namespace transformer_ops
