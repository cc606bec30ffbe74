#pragma once

#include <string>
#include <vector>

namespace transformer_ops {

// A torch.library schema: names, types and defaults of arguments, and results.
//   "linear(Tensor input, Tensor weight) -> Tensor output"
struct Schema {
  struct Field {
    std::string type;
    std::string name;
    std::string default_value = {};  // as the schema spells it; empty if there is none

    // An absent list is empty.
    bool may_be_absent() const { return type.ends_with('?') || type == "Tensor[]"; }
  };
  std::string name;
  std::vector<Field> arguments;
  std::vector<Field> results;

  bool empty() const { return name.empty(); }
  bool has_result(const std::string& result) const;
  bool has_argument(const std::string& argument) const;
};

// An empty text gives an empty schema. Throws PlanError if a field has no name.
Schema parse_schema(const std::string& text);
// The text of a schema, which parse_schema() reads.
std::string to_text(const Schema& schema);

}  // namespace transformer_ops
