// Which backward pass wrote last to each main_grad that is overwritten: the first gradient of a
// pass takes the place of what is there, and later ones add.
#pragma once

#include <cstdint>

namespace transformer_ops {

// `buffer` is a number that Python has given to it. 0 if no pass has written to it.
uint64_t last_pass_of(int64_t buffer);
void note_pass_of(int64_t buffer, uint64_t pass);
void forget_passes_of(int64_t buffer);

}  // namespace transformer_ops
