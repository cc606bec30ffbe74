// Sums and differences of 16 rows with butterflies: 64 additions for 16 numbers.
#include "kernels/hadamard.h"

#include "loops.h"
#include "masked.h"

namespace transformer_ops::cpu {
namespace {

using kernel::kHadamardRows;
using kernel::kHadamardSigns;

// One vector of each of 16 rows.
template <class V>
struct Sixteen {
  V row[kHadamardRows];
};

// Replaces each two rows whose numbers differ in one bit by their sum and their difference.
template <int64_t bit, class V>
TRANSFORMER_OPS_INLINE void butterflies(Sixteen<V>& x) {
  for (int64_t i = 0; i < kHadamardRows; ++i) {
    if ((i & bit) != 0) continue;
    const V a = x.row[i], b = x.row[i | bit];
    x.row[i] = a + b;
    x.row[i | bit] = a - b;
  }
}

template <class T>
void turn_block(const T* x, Acc<T>* out, int64_t h) {
  for_vectors<T>(
      h, [&](int64_t column, auto lanes) __attribute__((always_inline)) {
        Sixteen<Vec<T>> rows;
        for (int64_t i = 0; i < kHadamardRows; ++i) {
          const Vec<T> sign(static_cast<Acc<T>>(0.25f * kHadamardSigns[i]));
          rows.row[i] = load(x + i * h + column, lanes) * sign;
        }
        butterflies<1>(rows);
        butterflies<2>(rows);
        butterflies<4>(rows);
        butterflies<8>(rows);
        for (int64_t i = 0; i < kHadamardRows; ++i) {
          store_acc(out + i * h + column, rows.row[i], lanes);
        }
      });
}

namespace entry {

void hadamard_rows(DType dtype, const void* x, void* out, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const T* from = as<T>(x);
    auto* to = as<Acc<T>>(out);
    int64_t row = 0;
    for (; row + kHadamardRows <= rows; row += kHadamardRows) {
      turn_block(from + row * h, to + row * h, h);
    }
    for_vectors<T>((rows - row) * h, [&](int64_t i, auto lanes) {
      store_acc(to + row * h + i, load(from + row * h + i, lanes), lanes);
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(hadamard_rows, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
