// The backward of a gated linear unit, with its value recomputed, in one pass.
#include "kernels/glu.h"

#include "glu_rows.h"
#include "kernels/choose.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_glu;

namespace entry {

void glu_value_and_backward(const Glu& glu, DType dtype, void* buffer, const void* x, void* grad_x,
                            int64_t rows, int64_t n, int64_t h, int64_t first) {
  if (n == 0) return;
  const int64_t block = glu.interleave == 0 ? n : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      for (int64_t r = 0; r < rows; ++r) {
        T* both = as<T>(buffer) + r * n;
        const T* in = as<T>(x) + 2 * r * h;
        T* out = as<T>(grad_x) + 2 * r * h;
        for (int64_t done = 0; done < n; done += block) {
          const int64_t gate = glu.interleave == 0 ? first : 2 * (first + done);
          const int64_t linear = gate + (glu.interleave == 0 ? h : block);
          for_wide_vectors<T>(
              block, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
                const auto order = any_order(lanes);
                const auto grad = load(static_cast<const T*>(both) + done + i, order);
                const auto a = load(in + gate + i, order), b = load(in + linear + i, order);
                const auto grads = op.backward(grad, a, b);
                store(both + done + i, op.forward(a, b), order, false);
                store(out + gate + i, grads.gate, order, false);
                store(out + linear + i, grads.linear, order, false);
              });
        }
      }
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(glu_value_and_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
