#include "table.h"

namespace transformer_ops::cpu {
constexpr Kernels kernels_avx512 = make_table("avx512");
}  // namespace transformer_ops::cpu
