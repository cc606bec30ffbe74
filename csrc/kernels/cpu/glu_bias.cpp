// The backward of a gated linear unit and of the bias before it, in one pass.
#include "kernels/bias.h"

#include "glu_rows.h"
#include "kernels/choose.h"
#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_glu;

namespace entry {

void glu_bias_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x, void* grad_x,
                       void* grad_bias, int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      const int64_t size = sizeof(T);
      const bool stream = streams(grad_x, 2 * rows * h * size, block * size);
      ColumnSums<Acc<T>> sums(grad_bias, 2 * h);
      Acc<T>* sum = sums.group();
      for (int64_t r = 0; r < rows; ++r) {
        const T *g = as<T>(grad_y) + r * h, *in = as<T>(x) + 2 * r * h;
        T* out = as<T>(grad_x) + 2 * r * h;
        for_each_run(block, 1, h, [=](int64_t gate, int64_t linear, int64_t from) {
          const auto add = [=](int64_t i, auto both, auto lanes) __attribute__((always_inline)) {
            Acc<T>*to_gate = sum + gate + i, *to_linear = sum + linear + i;
            store_acc(to_gate, load_acc<T>(to_gate, lanes) + both.gate, lanes);
            store_acc(to_linear, load_acc<T>(to_linear, lanes) + both.linear, lanes);
          };
          glu_backward_run<WideLanes>(op, stream, g + from, in + gate, in + linear, out + gate,
                                      out + linear, block, add);
        });
        sums.end_row();
      }
      if (stream) finish_streaming();
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(glu_bias_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
