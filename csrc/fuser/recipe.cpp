#include "fuser/recipe.h"

#include <algorithm>
#include <charconv>
#include <mutex>
#include <string_view>
#include <vector>

#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"
#include "kernels/format.h"

namespace transformer_ops {
namespace {

using kernel::Format;

constexpr std::string_view kExact = "exact", kCustom = "custom ";
constexpr std::string_view kHadamard = "hadamard", kStochastic = "stochastic",
                           kDelayed = "delayed ";
constexpr std::string OperandFormats::*kOperands[] = {
    &OperandFormats::input, &OperandFormats::weight, &OperandFormats::grad_output};

const Format& row_of(const std::string& format) {
  const Format* const row = kernel::find_format(format);
  check(row != nullptr, "[recipe] format must be one of kernels/format.h, or 'exact', got '",
        format, "'");
  return *row;
}

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
  const bool is_stochastic = take(kStochastic), transforms = take(kHadamard);
  check(names.size() == std::size(kOperands), "[recipe] formats must be 3, got '", text, "'");
  OperandFormats formats{
      .transforms = transforms, .is_stochastic = is_stochastic, .history = history};
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == kExact) continue;
    const Format& row = row_of(names[i]);
    check(history == 0 || format_of_tensor(row.largest) == row.name,
          "[recipe] format of delayed scales must be 'e4m3' or 'e5m2', got '", text, "'");
    formats.*kOperands[i] = row.name;
  }
  return formats;
}

std::string formats_text(const OperandFormats& formats) {
  std::string text;
  for (const auto operand : kOperands) {
    const std::string& format = formats.*operand;
    text += text.empty() ? "" : ", ";
    text += format.empty() ? std::string(kExact) : format;
  }
  if (formats.transforms) text += ", " + std::string(kHadamard);
  if (formats.is_stochastic) text += ", " + std::string(kStochastic);
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

// Never deleted: a thread may run while static objects die.
Recipes& recipes = *new Recipes;

}  // namespace

const std::string& OperandFormats::format(const std::string& operand) const {
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

uint8_t format_number(const std::string& name) {
  return static_cast<uint8_t>(1 + (&row_of(name) - std::begin(kernel::kFormats)));
}

std::string format_name(uint8_t number) {
  return number == 0 ? "" : kernel::kFormats[number - 1].name;
}

std::string column_format(const std::string& format) {
  if (format.empty()) return format;
  const Format& row = row_of(format);
  if (row.block_rows != 1) return format;
  const auto turned = std::ranges::find_if(kernel::kFormats, [&](const Format& other) {
    return other.is_like(row) && other.block_rows == row.block_columns && other.block_columns == 1;
  });
  check(turned != std::end(kernel::kFormats), "[recipe] format must have one of its columns, got '",
        format, "'");
  return turned->name;
}

bool has_tensor_scale(const std::string& format) {
  if (format.empty()) return false;
  const Format& row = row_of(format);
  return row.per_tensor() || row.has_tensor_scale();
}

int64_t rows_of_block(std::string_view format) {
  const Format* const row = kernel::find_format(format);
  return row == nullptr || row->has_tensor_scale() ? 0 : row->block_rows;
}

bool has_one_scale(std::string_view format) {
  const Format* const row = kernel::find_format(format);
  return row != nullptr && row->per_tensor();
}

float largest_number(const std::string& format) {
  return format.empty() ? 0.0f : row_of(format).largest;
}

std::string format_of_tensor(float largest) {
  const auto found = std::ranges::find_if(kernel::kFormats, [&](const Format& row) {
    return row.per_tensor() && row.rule == kernel::ScaleRule::Float32 && row.largest == largest;
  });
  return found == std::end(kernel::kFormats) ? "" : found->name;
}

std::string codes_dtype(const std::string& format) {
  if (format.empty() || !row_of(format).per_tensor()) return "";
  return row_of(format).element == kernel::Element::E4M3 ? "float8_e4m3fn" : "float8_e5m2";
}

bool has_pairs_of_codes(const std::string& format) {
  return !format.empty() && row_of(format).element == kernel::Element::E2M1;
}

bool are_multiplied_in_blocks(const std::vector<std::string>& formats) {
  const auto is_nvfp4 = [](const std::string& format) {
    return has_pairs_of_codes(format) && row_of(format).block_columns == 16;
  };
  if (std::ranges::all_of(formats, is_nvfp4)) return true;
  bool are_square = true, are_e5m2 = true;
  int64_t block = 0;
  for (const std::string& format : formats) {
    if (format.empty()) return false;
    const Format& row = row_of(format);
    const int64_t size = std::max(row.block_rows, row.block_columns);
    if (!row.has_block_powers()) return false;
    if (block != 0 && size != block) return false;
    block = size;
    are_square &= row.block_rows == row.block_columns;
    are_e5m2 &= row.element == kernel::Element::E5M2;
  }
  return !are_square && !are_e5m2;
}

// Values of codes are exact in bfloat16, also times a power of two or a scale in E4M3.
DType operand_dtype(const std::string& format, DType wanted, bool scalable) {
  if (format.empty() || wanted == DType::Float32 || wanted == DType::Float64) return wanted;
  const bool is_short = row_of(format).has_block_powers() || (scalable && has_tensor_scale(format));
  return is_short && wanted == DType::BFloat16 ? wanted : DType::Float32;
}

}  // namespace transformer_ops
