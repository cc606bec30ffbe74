#include "fuser/policies.h"

#include <algorithm>
#include <array>

#include "fuser/error.h"

namespace transformer_ops {
namespace {

struct Row {
  const char* name;
  const char* codes;
};
// The names and formats, in the order of SavedFormat.
constexpr std::array<Row, 3> kSavedFormats = {
    {{"exact", ""}, {"fp8", "e4m3 1x128"}, {"int8", "int8 1x128"}}};

constexpr std::array<const char*, 3> kRecompute = {"none", "cheap", "products"};

const Row& row_of(SavedFormat format) { return kSavedFormats[static_cast<size_t>(format)]; }

}  // namespace

std::string to_text(SavedFormat format) { return row_of(format).name; }
NumberFormat codes_of(SavedFormat format) { return NumberFormat::named(row_of(format).codes); }

SavedFormat parse_saved_format(const std::string& text) {
  const auto found = std::ranges::find(kSavedFormats, text, &Row::name);
  check(found != kSavedFormats.end(), "[plan] saved must be exact, fp8 or int8, got '", text, "'");
  return static_cast<SavedFormat>(found - kSavedFormats.begin());
}

Recompute parse_recompute(const std::string& text) {
  const auto found = std::ranges::find(kRecompute, text);
  check(found != kRecompute.end(), "[plan] recompute must be none, cheap or products, got '", text,
        "'");
  return static_cast<Recompute>(found - kRecompute.begin());
}

}  // namespace transformer_ops
