// Sums of rows at given positions.
#include "kernels/permute.h"

#include "loops.h"

namespace transformer_ops::cpu {
namespace {

namespace entry {

void sum_rows_at(DType dtype, const void* x, const int32_t* positions, int64_t k, void* y,
                 int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const T* in = as<T>(x);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* at = positions + r * k;
      T* out = as<T>(y) + r * h;
      for_wide_vectors<T>(
          h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
            const auto order = any_order(lanes);
            using V = decltype(load(in, order));
            V sum(Acc<T>(0));
            for (int64_t j = 0; j < k; ++j) {
              if (at[j] >= 0) sum = sum + load(in + at[j] * h + i, order);
            }
            store(out + i, sum, order, false);
          });
    }
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(sum_rows_at, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
