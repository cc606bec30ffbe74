#pragma once

#include <cstdint>
#include <string>

#include "fuser/number_format.h"

namespace transformer_ops {

// The format in which tensors are saved for backward.
enum class SavedFormat : uint8_t { Exact, Fp8, Int8 };

// "exact", "fp8", "int8".
std::string to_text(SavedFormat format);
SavedFormat parse_saved_format(const std::string& text);
// The format of the codes.
NumberFormat codes_of(SavedFormat format);

struct SavedAs {
  SavedFormat format = SavedFormat::Exact;
  bool inputs = false;  // also for inputs and outputs, which the caller holds

  bool is_exact() const { return format == SavedFormat::Exact; }
  bool operator==(const SavedAs&) const = default;
};

// The outputs that backward recomputes instead of reading saved ones. Each value includes those
// before it.
enum class Recompute : uint8_t {
  None,      // those of ops whose attributes ask for it
  Cheap,     // those of ops that cost little compared to a matrix product
  Products,  // those of matrix products
};

// "none", "cheap", "products".
Recompute parse_recompute(const std::string& text);

// Settings of a group's owner for its plans.
struct Policies {
  Recompute recompute = Recompute::None;
  SavedAs saved = {};

  bool operator==(const Policies&) const = default;
};

}  // namespace transformer_ops
