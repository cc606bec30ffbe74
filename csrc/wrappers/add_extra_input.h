// What AddExtraInput and the fused ops that contain one share.
#pragma once

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises where the extra input cannot be added to `sum`, which it must not widen.
void check_extra_input(const Checks& check, const Tensor& extra, const TensorSpec& sum);

// Why a rule whose op k is AddExtraInput does not fire, or none. It may take a float32 extra input
// beside 16-bit numbers, or tensors of one dtype only.
std::optional<std::string> different_summands(const Match& match, int k, bool or_float32 = false);

}  // namespace transformer_ops
