// The backward pass that last wrote to each main_grad that is overwritten. The first gradient of a
// pass overwrites the buffer, and later ones add to it.
#pragma once

#include <cstdint>

namespace transformer_ops {

// `buffer` is a number assigned by Python. Returns 0 if no pass has written to the buffer.
uint64_t last_pass_of(int64_t buffer);
void note_pass_of(int64_t buffer, uint64_t pass);
void forget_passes_of(int64_t buffer);

}  // namespace transformer_ops
