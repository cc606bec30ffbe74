#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace transformer_ops {

// Constructor state of an op, as the planner sees it.
using Attribute =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<bool>>;
using Attributes = std::map<std::string, Attribute>;

// The text of a constant in a plan, and the way back. Floats round-trip exactly.
std::string to_text(const Attribute& attribute);
Attribute parse_attribute(const std::string& text);

}  // namespace transformer_ops
