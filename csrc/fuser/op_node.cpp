#include "fuser/op_node.h"

#include <algorithm>

#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {

OpNode make_op(const std::string& kind, Attributes attributes) {
  check(is_declared(kind), "[Pipeline] kind must be that of a declared op, got '", kind, "'");
  const OpDeclaration& row = declaration(kind);
  for (const std::string& name : row.attributes) {
    check(attributes.contains(name), "[", kind, "] attributes must have '", name, "', got none");
  }
  for (const auto& [name, value] : attributes) {
    const bool is_known = std::ranges::find(row.attributes, name) != row.attributes.end();
    check(is_known, "[", kind, "] attributes must be declared, got '", name, "'");
  }
  OpNode op{.kind = kind,
            .attributes = std::move(attributes),
            .extra_inputs = row.extra_inputs,
            .extra_outputs = row.extra_outputs,
            .parameters = static_cast<int>(row.parameters.size())};
  op.sources.resize(row.extra_inputs);
  op.visible.assign(row.extra_outputs, true);
  return op;
}

size_t extra_inputs_from_caller(const std::vector<OpNode>& ops) {
  size_t count = 0;
  for (const OpNode& op : ops) {
    count += std::ranges::count_if(op.sources, [](const auto& source) { return !source; });
  }
  return count;
}

}  // namespace transformer_ops
