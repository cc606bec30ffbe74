#pragma once

#include <string>
#include <vector>

namespace transformer_ops {

// What the planner reads of a torch.library schema: argument and result names with their types.
//   "linear(Tensor input, Tensor weight) -> Tensor output"
struct Schema {
  struct Field {
    std::string type;
    std::string name;

    // A list that is not there is empty.
    bool may_be_absent() const { return type.ends_with('?') || type == "Tensor[]"; }
  };
  std::string name;
  std::vector<Field> arguments;
  std::vector<Field> results;

  bool empty() const { return name.empty(); }
  bool has_result(const std::string& result) const;
  bool has_argument(const std::string& argument) const;
};

// An empty text gives an empty schema. Throws PlanError where a field has no name.
Schema parse_schema(const std::string& text);

}  // namespace transformer_ops
