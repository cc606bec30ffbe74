// Delayed scaling from region to region: scales made of what calls have met.
#pragma once

#include <functional>
#include <vector>

#include "quantization/delayed_scaling.h"

namespace transformer_ops::delayed_scaling {

// What an op keeps; `history` has rows like the others, the latest one first.
struct Buffers {
  at::Tensor scale, amax, grad_amax, history;
  at::Tensor largest;  // [3], of the formats
};
// Throws c10::Error where they do not fit together; `who` begins the message.
void check(const char* who, const Buffers& buffers);

// Takes the larger magnitudes of forward and backward into the histories, and empties those two.
// A scale that changes is a new tensor: what backward has saved is what forward used. A magnitude
// that is not finite leaves history and scale as they are, and one of zero the scale. `reduce` is
// called for each device, with the magnitudes of all that is there in one row, infinite in place of
// NaN, which not every reduction over processes knows to be larger than numbers. Throws c10::Error
// where buffers do not fit together, before anything changes.
void update_scales(std::vector<Buffers>& all, int64_t margin, bool most_recent,
                   const std::function<void(at::Tensor&)>& reduce = {});

}  // namespace transformer_ops::delayed_scaling
