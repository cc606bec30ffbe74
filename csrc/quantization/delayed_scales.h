// Delayed scaling between regions: computes scales from the largest magnitudes of calls.
#pragma once

#include <functional>
#include <vector>

#include "quantization/delayed_scaling.h"

namespace transformer_ops::delayed_scaling {

// The buffers of an op; `history` has rows like the others, the latest one first.
struct Buffers {
  at::Tensor scale, amax, grad_amax, history;
  at::Tensor largest;  // [3], the largest numbers of the formats
};
// Throws c10::Error if they do not fit together; `who` begins the message.
void check(const char* who, const Buffers& buffers);

// Adds the larger magnitudes of forward and backward to the histories, and resets those two
// buffers. A scale that changes becomes a new tensor, because backward has saved the one of
// forward. A magnitude that is not finite changes neither history nor scale, and a zero does not
// change the scale. `reduce` is called for each device with all magnitudes in one row. NaN is
// passed as infinity, because some reductions over processes do not order NaN above numbers. Throws
// c10::Error, with nothing changed, if buffers do not fit together.
void update_scales(std::vector<Buffers>& all, int64_t margin, bool most_recent,
                   const std::function<void(at::Tensor&)>& reduce = {});

}  // namespace transformer_ops::delayed_scaling
