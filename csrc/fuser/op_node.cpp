#include "fuser/op_node.h"

#include <algorithm>

#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {

OpNode make_op(const std::string& kind, Attributes attributes) {
  check(is_declared(kind), "[Pipeline] kind must be that of a declared op, got '", kind, "'");
  const OpDeclaration& row = declaration(kind);
  for (const std::string& name : row.attributes) {
    check(attributes.contains(name) || row.is_optional(name), "[", kind, "] attributes must have '",
          name, "', got none");
  }
  for (const auto& [name, value] : attributes) {
    check(row.has_attribute(name) || row.has_flag(name), "[", kind,
          "] attributes must be declared, got '", name, "'");
  }
  OpNode op{.kind = kind,
            .attributes = std::move(attributes),
            .extra_inputs = row.extra_inputs,
            .extra_outputs = row.extra_outputs};
  op.parameters = row.parameter_tensors(op.attributes);
  op.sources.resize(op.extra_inputs.size());
  op.visible.assign(op.extra_outputs.size(), true);
  return op;
}

std::vector<std::string> numbered_names(size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back(std::to_string(i));
  return names;
}

int position_of(const std::vector<std::string>& names, const std::string& name) {
  const auto found = std::ranges::find(names, name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

size_t extra_inputs_from_caller(const std::vector<OpNode>& ops) {
  size_t count = 0;
  for (const OpNode& op : ops) {
    count += std::ranges::count_if(op.sources, [](const auto& source) { return !source; });
  }
  return count;
}

}  // namespace transformer_ops
