#pragma once

#include <cstdint>
#include <string>

#include "fuser/number_format.h"

namespace transformer_ops {

// How forward keeps the tensors that backward reads.
enum class SavedFormat : uint8_t { Exact, Fp8, Int8 };

// "exact", "fp8", "int8".
std::string to_text(SavedFormat format);
SavedFormat parse_saved_format(const std::string& text);
// In which the codes are.
NumberFormat codes_of(SavedFormat format);

struct SavedAs {
  SavedFormat format = SavedFormat::Exact;
  bool inputs = false;  // also of tensors that the caller holds: input and outputs

  bool is_exact() const { return format == SavedFormat::Exact; }
  bool operator==(const SavedAs&) const = default;
};

// What a group's owner decides about its plans.
struct Policies {
  bool recompute = false;  // cheap outputs in backward instead of saving them
  SavedAs saved = {};

  bool operator==(const Policies&) const = default;
};

}  // namespace transformer_ops
