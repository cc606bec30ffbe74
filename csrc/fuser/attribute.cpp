#include "fuser/attribute.h"

#include <charconv>
#include <cmath>

#include "fuser/error.h"

namespace transformer_ops {
namespace {

std::string float_text(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  // "1" would be parsed as an integer.
  const bool looks_integral = text.find_first_of(".en") == std::string::npos;
  return looks_integral ? text + ".0" : text;
}

template <typename List, typename Function>
std::string list_text(const List& list, Function&& item_text) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i ? ", " : "") + item_text(list[i]);
  return text + "]";
}

template <typename Number>
bool parse_number(const std::string& text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string quote(const std::string& raw) {
  std::string text = "\"";
  for (const char c : raw) {
    if (c == '"' || c == '\\' || c == '\n') text += '\\';
    text += c == '\n' ? 'n' : c;
  }
  return text + "\"";
}

std::string unquote(const std::string& text) {
  std::string raw;
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    const bool escaped = text[i] == '\\';
    if (escaped) ++i;
    raw += escaped && text[i] == 'n' ? '\n' : text[i];
  }
  return raw;
}

Attribute parse_list(const std::string& text) {
  std::vector<int64_t> integers;
  std::vector<double> numbers;
  std::vector<bool> booleans;
  const std::string body = text.substr(1, text.size() - 2);
  for (size_t begin = 0; begin < body.size();) {
    size_t end = body.find(',', begin);
    end = end == std::string::npos ? body.size() : end;
    const size_t first = body.find_first_not_of(' ', begin);
    const std::string item = first < end ? body.substr(first, end - first) : "";
    int64_t integer = 0;
    double number = 0;
    if (item == "true" || item == "false") {
      booleans.push_back(item == "true");
    } else if (parse_number(item, integer)) {
      integers.push_back(integer);
    } else if (parse_number(item, number)) {
      numbers.push_back(number);
    } else {
      fail("[plan] a list must hold numbers or booleans, got '", text, "'");
    }
    begin = end + 1;
  }
  const int types = !integers.empty() + !numbers.empty() + !booleans.empty();
  check(types < 2, "[plan] a list must hold one type, got '", text, "'");
  if (!booleans.empty()) return booleans;
  if (!numbers.empty()) return numbers;
  return integers;
}

}  // namespace

std::string to_text(const Attribute& attribute) {
  struct Printer {
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(int64_t value) const { return std::to_string(value); }
    std::string operator()(double value) const { return float_text(value); }
    std::string operator()(const std::string& value) const { return quote(value); }
    std::string operator()(const std::vector<int64_t>& value) const {
      return list_text(value, [](int64_t item) { return std::to_string(item); });
    }
    std::string operator()(const std::vector<double>& value) const {
      return list_text(value, float_text);
    }
    std::string operator()(const std::vector<bool>& value) const {
      return list_text(value, [](bool item) { return std::string(item ? "true" : "false"); });
    }
  };
  return std::visit(Printer{}, attribute);
}

Attribute parse_attribute(const std::string& text) {
  check(!text.empty(), "[plan] a constant must not be empty");
  if (text == "true" || text == "false") return text == "true";
  if (text.front() == '"') {
    check(text.size() >= 2 && text.back() == '"', "[plan] a string must be closed, got ", text);
    return unquote(text);
  }
  if (text.front() == '[') {
    check(text.back() == ']', "[plan] a list must be closed, got ", text);
    return parse_list(text);
  }
  int64_t integer = 0;
  if (parse_number(text, integer)) return integer;
  double number = 0;
  if (parse_number(text, number)) return number;
  fail("[plan] a constant must be a boolean, number, string or list, got '", text, "'");
}

}  // namespace transformer_ops
