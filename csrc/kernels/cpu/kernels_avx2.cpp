#include "table.h"

namespace transformer_ops::cpu {
constexpr Kernels kernels_avx2 = make_table("avx2");
}  // namespace transformer_ops::cpu
