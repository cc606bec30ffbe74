#include "fuser/number_format.h"

#include <algorithm>
#include <iterator>

#include "fuser/error.h"
#include "fuser/text.h"
#include "kernels/format.h"

namespace transformer_ops {
namespace {

// The class of the tensor decodes it (quantization/stored.py). Nothing is rounded to this format.
constexpr kernel::Format kOfItsClass = {.name = "of its class"};
constexpr uint8_t kNumberOfItsClass = 255;
static_assert(std::size(kernel::kFormats) < kNumberOfItsClass);

const kernel::Format& row_of(uint8_t number) {
  return number == kNumberOfItsClass ? kOfItsClass : kernel::kFormats[number - 1];
}

// The number of the first row for which the function returns true; 0 if there is none.
template <typename Function>
uint8_t number_of(const Function& holds) {
  const auto row = std::ranges::find_if(kernel::kFormats, holds);
  return row == std::end(kernel::kFormats)
             ? 0
             : static_cast<uint8_t>(1 + (row - std::begin(kernel::kFormats)));
}

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const kernel::Format& row : kernel::kFormats) found.emplace_back(row.name);
  return found;
}

}  // namespace

NumberFormat NumberFormat::find(std::string_view name) {
  if (name == kOfItsClass.name) return NumberFormat(kNumberOfItsClass);
  return NumberFormat(number_of([&](const kernel::Format& row) { return name == row.name; }));
}

NumberFormat NumberFormat::named(std::string_view name) {
  const NumberFormat found = find(name);
  check(!found.is_exact() || name.empty(),
        "[recipe] format must be one of kernels/format.h, or 'exact', got '", name,
        "'; the nearest is '", nearest_of(std::string(name), names()), "'");
  return found;
}

NumberFormat NumberFormat::of_tensor(float largest) {
  return NumberFormat(number_of([&](const kernel::Format& row) {
    return row.per_tensor() && row.rule == kernel::ScaleRule::Float32 && row.largest == largest;
  }));
}

std::string NumberFormat::name() const { return is_exact() ? "" : row_of(number_).name; }

NumberFormat NumberFormat::of_columns() const {
  if (is_exact() || row_of(number_).block_rows != 1) return *this;
  const kernel::Format& own = row_of(number_);
  const NumberFormat turned(number_of([&](const kernel::Format& row) {
    return row.is_like(own) && row.block_rows == own.block_columns && row.block_columns == 1;
  }));
  check(!turned.is_exact(), "[recipe] format must have one of its columns, got '", name(), "'");
  return turned;
}

bool NumberFormat::has_tensor_scale() const {
  return !is_exact() && (row_of(number_).per_tensor() || row_of(number_).has_tensor_scale());
}

bool NumberFormat::has_one_scale() const { return !is_exact() && row_of(number_).per_tensor(); }

bool NumberFormat::has_pairs_of_codes() const {
  return !is_exact() && row_of(number_).element == kernel::Element::E2M1;
}

int64_t NumberFormat::rows_of_block() const {
  return has_tensor_scale() || is_exact() ? 0 : row_of(number_).block_rows;
}

float NumberFormat::largest() const { return is_exact() ? 0.0f : row_of(number_).largest; }

std::string NumberFormat::codes_dtype() const {
  if (!has_one_scale()) return "";
  return row_of(number_).element == kernel::Element::E4M3 ? "float8_e4m3fn" : "float8_e5m2";
}

// Values of codes are exact in bfloat16, also times a power of two or an E4M3 scale.
DType NumberFormat::operand_dtype(DType wanted, bool scalable) const {
  if (is_exact() || wanted == DType::Float32 || wanted == DType::Float64) return wanted;
  const bool is_short = row_of(number_).has_block_powers() || (scalable && has_tensor_scale());
  return is_short && wanted == DType::BFloat16 ? wanted : DType::Float32;
}

bool are_multiplied_in_blocks(const std::vector<NumberFormat>& formats) {
  const auto is_nvfp4 = [](NumberFormat format) {
    return format.has_pairs_of_codes() && row_of(format.number_).block_columns == 16;
  };
  if (std::ranges::all_of(formats, is_nvfp4)) return true;
  bool are_square = true, are_e5m2 = true;
  int64_t block = 0;
  for (const NumberFormat format : formats) {
    if (format.is_exact()) return false;
    const kernel::Format& row = row_of(format.number_);
    const int64_t size = std::max(row.block_rows, row.block_columns);
    if (!row.has_block_powers()) return false;
    if (block != 0 && size != block) return false;
    block = size;
    are_square &= row.block_rows == row.block_columns;
    are_e5m2 &= row.element == kernel::Element::E5M2;
  }
  return !are_square && !are_e5m2;
}

}  // namespace transformer_ops
