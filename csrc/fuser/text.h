// The text forms of plans and calls.
#pragma once

#include <string>
#include <vector>

namespace transformer_ops {

// Splits at a separator that stands outside of quotes and brackets; empty parts are dropped.
std::vector<std::string> split_text(const std::string& text, char separator);

// The name in `known` that is the fewest letter changes away from `text`; empty if `known` is.
std::string nearest_of(const std::string& text, const std::vector<std::string>& known);

}  // namespace transformer_ops
