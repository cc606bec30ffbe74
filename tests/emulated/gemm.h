#pragma once

#include <vector>

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {

// The products computed since the last call; no more than the latest few.
std::vector<GemmPlan> take_products();

// Whether the device that is emulated multiplies codes; at first it does.
void set_multiplies_codes(bool value);
void set_multiplies_blocks(bool value);  // likewise, with scales of blocks
void set_multiplies_mx(bool value);
void set_multiplies_nvfp4(bool value);

}  // namespace transformer_ops::cuda
