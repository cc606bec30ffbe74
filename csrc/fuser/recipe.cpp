#include "fuser/recipe.h"

#include <algorithm>
#include <charconv>
#include <mutex>
#include <string_view>
#include <vector>

#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

constexpr std::string_view kExact = "exact", kCustom = "custom ";
constexpr std::string_view kHadamard = "hadamard", kStochastic = "stochastic",
                           kDelayed = "delayed ";
constexpr NumberFormat OperandFormats::*kOperands[] = {
    &OperandFormats::input, &OperandFormats::weight, &OperandFormats::grad_output};

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos;) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

int64_t parse_number(const std::string& text) {
  int64_t number = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  check(error == std::errc() && stop == end && number >= 0,
        "[recipe] number must be an integer that is not negative, got '", text, "'");
  return number;
}

OperandFormats parse_formats(const std::string& text) {
  std::vector<std::string> names = split(text, ", ");
  int64_t history = 0;
  if (names.size() > std::size(kOperands) && names.back().starts_with(kDelayed)) {
    history = parse_number(names.back().substr(kDelayed.size()));
    check(history > 0, "[recipe] length of a history must be positive, got '", text, "'");
    names.pop_back();
  }
  const auto take = [&](std::string_view word) {
    const bool is_last = names.size() > std::size(kOperands) && names.back() == word;
    if (is_last) names.pop_back();
    return is_last;
  };
  const Rounding rounding = take(kStochastic) ? Rounding::Stochastic : Rounding::Nearest;
  const Transform transform = take(kHadamard) ? Transform::Hadamard : Transform::None;
  check(names.size() == std::size(kOperands), "[recipe] formats must be 3, got '", text, "'");
  OperandFormats formats{.transform = transform, .rounding = rounding, .history = history};
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == kExact) continue;
    const auto format = NumberFormat::named(names[i]);
    check(format.largest() > 0, "[recipe] format must be one that rounds, got '", text, "'");
    check(history == 0 || NumberFormat::of_tensor(format.largest()) == format,
          "[recipe] format of delayed scales must be 'e4m3' or 'e5m2', got '", text, "'");
    formats.*kOperands[i] = format;
  }
  return formats;
}

std::string formats_text(const OperandFormats& formats) {
  std::string text;
  for (const auto operand : kOperands) {
    const NumberFormat format = formats.*operand;
    text += text.empty() ? "" : ", ";
    text += format.is_exact() ? std::string(kExact) : format.name();
  }
  if (formats.transform == Transform::Hadamard) text += ", " + std::string(kHadamard);
  if (formats.rounding == Rounding::Stochastic) text += ", " + std::string(kStochastic);
  if (formats.is_delayed()) text += ", " + std::string(kDelayed) + std::to_string(formats.history);
  return text;
}

Recipe parse(const std::string& text) {
  if (text.starts_with(kCustom)) return {.custom = parse_number(text.substr(kCustom.size()))};
  const std::vector<std::string> parts = split(text, "; ");
  Recipe recipe{.all = parse_formats(parts[0])};
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::vector<std::string> row = split(parts[i], ": ");
    check(row.size() == 2, "[recipe] formats of an op must be 'op: formats', got '", parts[i], "'");
    recipe.ops[static_cast<int>(parse_number(row[0]))] = parse_formats(row[1]);
  }
  return recipe;
}

struct Recipes {
  ForkSafeMutex mutex;
  std::map<std::string, Recipe> rows;
};

// It is never deleted, because a thread may run while static objects are destroyed.
Recipes& recipes = *new Recipes;

}  // namespace

NumberFormat OperandFormats::format(const std::string& operand) const {
  if (operand == "weight") return weight;
  return operand == "grad_output" ? grad_output : input;
}

const OperandFormats& Recipe::of(int op) const {
  const auto found = ops.find(op);
  return found == ops.end() ? all : found->second;
}

bool Recipe::has_delayed() const {
  const auto is_delayed = [](const auto& row) { return row.second.is_delayed(); };
  return all.is_delayed() || std::ranges::any_of(ops, is_delayed);
}

std::string to_text(const Recipe& recipe) {
  if (recipe.custom >= 0) return std::string(kCustom) + std::to_string(recipe.custom);
  std::string text = formats_text(recipe.all);
  for (const auto& [op, formats] : recipe.ops) {
    text += "; " + std::to_string(op) + ": " + formats_text(formats);
  }
  return text;
}

const Recipe* recipe_of(const std::string& text) {
  const std::lock_guard lock(recipes.mutex);
  const auto found = recipes.rows.find(text);
  if (found != recipes.rows.end()) return &found->second;
  return &recipes.rows.emplace(text, parse(text)).first->second;
}

}  // namespace transformer_ops
