// What cuBLASLt makes of a plan, taken at its word. Sums are formed in double, and what is stored
// is rounded to its dtype.
#pragma once

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {

void interpret(const GemmPlan& plan);

}  // namespace transformer_ops::cuda
