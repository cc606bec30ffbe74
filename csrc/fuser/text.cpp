#include "fuser/text.h"

#include <algorithm>
#include <numeric>

namespace transformer_ops {

std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  bool quoted = false;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\' && i + 1 < text.size()) {
      parts.back() += c;
      parts.back() += text[++i];
      continue;
    }
    if (c == '"') quoted = !quoted;
    if (!quoted) depth += (c == '[' || c == '(') - (c == ']' || c == ')');
    if (c == separator && !quoted && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
  }
  std::erase(parts, "");
  return parts;
}

namespace {

// The number of letters to insert, delete or replace (Levenshtein 1966).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_of(const std::string& text, const std::vector<std::string>& known) {
  const auto far = [&](const std::string& name) { return distance(text, name); };
  const auto found = std::ranges::min_element(known, {}, far);
  return found == known.end() ? std::string() : *found;
}

}  // namespace transformer_ops
