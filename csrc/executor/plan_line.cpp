#include "executor/plan_line.h"

#include <algorithm>

namespace transformer_ops {
namespace {

constexpr char kEnd = '|';    // of a line of the text
constexpr char kQuote = '`';  // instead of a double quote

bool is_plain(char c) { return c >= ' ' && c <= '~' && c != kEnd && c != kQuote && c != '\\'; }

}  // namespace

std::optional<std::string> to_line(std::string_view text) {
  std::string line(text);
  for (char& c : line) {
    if (c != '\n' && !is_plain(c)) return std::nullopt;
    if (c == '\n') c = kEnd;
    if (c == '"') c = kQuote;
  }
  return line;
}

std::string from_line(std::string_view line) {
  std::string text(line);
  if (text.find('\n') != std::string::npos) return text;
  std::ranges::replace(text, kEnd, '\n');
  std::ranges::replace(text, kQuote, '"');
  return text;
}

}  // namespace transformer_ops
