// Delayed scaling rounds tensors by a scale that is known before them, because it comes from the
// largest magnitudes of earlier tensors. The caller owns buffers of shape [3] or, for ops on
// groups, [3, groups]:
//
//   scale   of input, weight and output gradient
//   amax    the largest magnitude of each since the scales were computed; -1 if there was none
#pragma once

#include <atomic>

#include "fuser/quantize.h"
#include "op/typed_op.h"

namespace transformer_ops::delayed_scaling {

inline constexpr int64_t kPositions = kScalePositions;
inline constexpr float kNothing = -1.0f;

void check_position(const char* op, int64_t position);
// Raises unless the buffer has a row for input, weight and gradient.
void check_row(const char* op, const char* name, const Tensor& buffer);

// NaN is larger than all numbers.
bool is_larger(float a, float b);
void take_larger(std::atomic_ref<float> best, float found);

}  // namespace transformer_ops::delayed_scaling
