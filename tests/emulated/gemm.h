#pragma once

#include <vector>

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {

// The products computed since the last call; no more than the latest few.
std::vector<GemmPlan> take_products();

}  // namespace transformer_ops::cuda
