#include "fuser/dtype.h"

#include <algorithm>
#include <array>

#include "fuser/error.h"

namespace transformer_ops {
namespace {
constexpr std::array kNames = {"unknown", "float16", "bfloat16", "float32", "float64"};
}

std::string to_text(DType dtype) { return kNames[static_cast<size_t>(dtype)]; }

DType parse_dtype(const std::string& text) {
  const auto found = std::ranges::find(kNames, text);
  check(found != kNames.end(), "[plan] dtype must be one torch knows as floating, got '", text,
        "'");
  return static_cast<DType>(found - kNames.begin());
}

DType promote(DType a, DType b) {
  if (a == DType::Unknown || b == DType::Unknown) return DType::Unknown;
  const bool mixed_halves = a != b && std::max(a, b) == DType::BFloat16;
  return mixed_halves ? DType::Float32 : std::max(a, b);
}

}  // namespace transformer_ops
