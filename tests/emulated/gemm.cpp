// cuBLASLt's part of the emulated library.
#include "interpret.h"

namespace transformer_ops::cuda {

bool gemm(Stream, const Gemm& gemm) {
  const auto plan = plan_gemm(gemm);
  if (!plan) return false;
  interpret(*plan);
  return true;
}

}  // namespace transformer_ops::cuda
