#include "fuser/schema.h"

#include <algorithm>

#include "fuser/error.h"

namespace transformer_ops {
namespace {

// Splits "Tensor input, bool[2] mask" at commas; brackets in types contain no commas.
std::vector<Schema::Field> parse_fields(const std::string& text, const std::string& schema) {
  std::vector<Schema::Field> fields;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.find(',', begin), text.size());
    std::string field = text.substr(begin, end - begin);
    field.erase(0, field.find_first_not_of(' '));
    const size_t equals = std::min(field.find('='), field.size() - 1);
    std::string default_value = field.substr(equals + 1);
    field = field.substr(0, field.find('='));
    const size_t space = field.find_last_of(' ');
    check(space != std::string::npos, "[schema] every field must have a name, got '", field,
          "' in '", schema, "'");
    fields.push_back({field.substr(0, space), field.substr(space + 1), std::move(default_value)});
    begin = end + 1;
  }
  return fields;
}

std::string to_text(const std::vector<Schema::Field>& fields) {
  std::string text;
  for (const Schema::Field& field : fields) {
    text += (text.empty() ? "" : ", ") + field.type + " " + field.name;
    if (!field.default_value.empty()) text += "=" + field.default_value;
  }
  return text;
}

bool has_field(const std::vector<Schema::Field>& fields, const std::string& name) {
  return std::ranges::any_of(fields, [&](const auto& field) { return field.name == name; });
}

}  // namespace

bool Schema::has_result(const std::string& result) const { return has_field(results, result); }

bool Schema::has_argument(const std::string& argument) const {
  return has_field(arguments, argument);
}

Schema parse_schema(const std::string& text) {
  if (text.empty()) return {};
  const size_t arrow = text.find(" -> ");
  const size_t open = text.find('(');
  check(arrow != std::string::npos && open < arrow, "[schema] must read 'name(...) -> ...', got '",
        text, "'");
  const size_t close = text.rfind(')', arrow);
  std::string results = text.substr(arrow + 4);
  if (results.front() == '(') results = results.substr(1, results.size() - 2);
  return {text.substr(0, open), parse_fields(text.substr(open + 1, close - open - 1), text),
          parse_fields(results, text)};
}

std::string to_text(const Schema& schema) {
  const std::string results = to_text(schema.results);
  return schema.name + "(" + to_text(schema.arguments) + ") -> " +
         (schema.results.size() == 1 ? results : "(" + results + ")");
}

}  // namespace transformer_ops
