#include "table.h"

namespace transformer_ops::cpu {
constexpr Kernels kernels_default = make_table("default");
}  // namespace transformer_ops::cpu
