// One table for each instruction set that isa.cmake compiles.
#pragma once

#include "kernels.h"

namespace transformer_ops::cpu {

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace transformer_ops::cpu
