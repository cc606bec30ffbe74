// How plans and calls are written.
#pragma once

#include <string>
#include <vector>

namespace transformer_ops {

// Splits at a separator that stands outside of quotes and brackets; empty parts are left out.
std::vector<std::string> split_text(const std::string& text, char separator);

// That of `known` which the fewest changes of letters make of `text`; empty where none is known.
std::string nearest_of(const std::string& text, const std::vector<std::string>& known);

}  // namespace transformer_ops
