// Code shared by AddExtraInput and the fused ops that contain it.
#pragma once

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises if the extra input cannot be added to `sum` without a wider result.
void check_extra_input(const Checks& check, const Tensor& extra, const TensorSpec& sum);

// The reason why a rule whose op k is AddExtraInput does not apply, or none. It accepts tensors of
// one dtype and, if `or_float32` is set, a float32 extra input with 16-bit numbers.
std::optional<std::string> different_summands(const Match& match, int k, bool or_float32 = false);

}  // namespace transformer_ops
