// Computes a plan exactly as cuBLASLt is told to. Sums are in double, and stored results are
// rounded to their dtype.
#pragma once

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {

void interpret(const GemmPlan& plan);

}  // namespace transformer_ops::cuda
