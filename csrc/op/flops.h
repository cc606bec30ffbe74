// What a FLOP counter needs to know about typed ops.
#pragma once

#include <string>
#include <vector>

#include "op/typed_op.h"

namespace transformer_ops {

// A typed op that multiplies matrices, in one of its forms (op/variant.h).
struct CountedOp {
  std::string name;
  // The op itself has a result for each flag of its output_mask; another form may have fewer.
  std::vector<std::string> results;
  Products products;
};
std::vector<CountedOp> counted_ops();

// Raises if `products` names something that the schema does not have.
void check_products(const TypedOp& op);

}  // namespace transformer_ops
