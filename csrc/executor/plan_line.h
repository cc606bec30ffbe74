// The text of a plan in one line and without quotes. Code generators put it into source code, and
// Inductor's C++ wrapper does not escape it there.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace transformer_ops {

// Returns none if the text has characters that the line uses for others, or that are no ASCII.
std::optional<std::string> to_line(std::string_view text);
// The text of the line; another text, which has several lines, does not change.
std::string from_line(std::string_view line);

}  // namespace transformer_ops
