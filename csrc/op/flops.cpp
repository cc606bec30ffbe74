#include "op/flops.h"

#include "fuser/schema.h"
#include "op/variant.h"

namespace transformer_ops {

std::vector<CountedOp> counted_ops() {
  std::vector<CountedOp> found;
  for (const Variant* variant : all_variants()) {
    const TypedOp& op = variant->op;
    if (op.products.list.empty() && op.products.of_heads == 0) continue;
    CountedOp row{.name = variant->name, .products = op.products};
    for (const auto& result : parse_schema(op.schema).results) row.results.push_back(result.name);
    found.push_back(std::move(row));
  }
  return found;
}

void check_products(const TypedOp& op) {
  if (op.products.list.empty()) return;
  const Schema schema = parse_schema(op.schema);
  const auto check = [&](bool is_there, const char* what, const std::string& name) {
    TORCH_CHECK(is_there, "[", schema.name, "] products must name ", what, ", got '", name, "'");
  };
  const std::string& rows = op.products.rows;
  check(rows.empty() || schema.has_argument(rows) || schema.has_result(rows),
        "an argument or a result that has the rows", rows);
  const bool is_backward = schema.results[0].name.starts_with("grad_");
  for (const Product& product : op.products.list) {
    check(schema.has_argument(product.matrix), "matrices that are arguments", product.matrix);
    for (const std::string& result : product.needed_for) {
      check(!is_backward || schema.has_result(result), "results of a backward", result);
    }
  }
}

}  // namespace transformer_ops
