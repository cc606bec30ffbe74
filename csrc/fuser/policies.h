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

// Settings of a group's owner for its plans.
struct Policies {
  bool recompute = false;  // recompute cheap outputs in backward instead of saving them
  SavedAs saved = {};

  bool operator==(const Policies&) const = default;
};

}  // namespace transformer_ops
