#pragma once

#include <vector>

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {

// The most recent products since the last call.
std::vector<GemmPlan> take_products();

// Sets whether the emulated device multiplies codes; at first it does.
void set_multiplies_codes(bool value);
void set_multiplies_blocks(bool value);  // the same for codes with block scales
void set_multiplies_mx(bool value);
void set_multiplies_nvfp4(bool value);
void set_multiplies_groups(bool value);

}  // namespace transformer_ops::cuda
