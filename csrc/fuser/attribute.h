#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace transformer_ops {

// One constructor argument of an op, as the planner sees it.
using Attribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>,
                               std::vector<double>, std::vector<bool>>;
using Attributes = std::map<std::string, Attribute>;

// Conversion between a constant and its text in a plan. Floats round-trip exactly.
std::string to_text(const Attribute& attribute);
Attribute parse_attribute(const std::string& text);

}  // namespace transformer_ops
