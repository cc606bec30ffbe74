// Activations whose rows are scaled.
#include "kernels/scaled.h"

#include "glu_rows.h"
#include "kernels/choose.h"
#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

// The GLUs that scaled ops use. These are fewer than with_glu() has, because each is compiled for
// each dtype.
template <class A, class F>
void with_scaled_glu(const Glu& glu, F f) {
  if (glu.kind == GluKind::SwiGLU) return f(math::GatedBy<math::SiLU>());
  if (glu.kind == GluKind::SiTUGLU) {
    return f(math::SiTUGLU<A>{static_cast<A>(glu.beta1), static_cast<A>(glu.beta2)});
  }
  f(math::ClampedSwiGLU<A>{static_cast<A>(glu.limit), static_cast<A>(glu.alpha),
                           static_cast<A>(glu.offset)});
}

// The sum of a row, in double for each lane.
template <class T>
struct RowSum {
  LaneSums<T> sums;

  template <class V>
  TRANSFORMER_OPS_INLINE void add(V x) {
    sums.add(fold(x));
  }
  void write(Acc<T>* to) const {
    if (to != nullptr) *to = static_cast<Acc<T>>(sums.total());
  }
};

template <class V, class A>
TRANSFORMER_OPS_INLINE V times(V x, A scale) {
  return x * V(scale);
}

namespace entry {

void scaled_glu_forward(const Glu& glu, DType dtype, const void* x, const void* scales, void* y,
                        int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_scaled_glu<Acc<T>>(glu, [&](auto op) {
      for (int64_t r = 0; r < rows; ++r) {
        const T* in = as<T>(x) + 2 * r * h;
        T* out = as<T>(y) + r * h;
        const Acc<T> scale = as<Acc<T>>(scales)[r];
        for_each_run(block, 1, h, [=](int64_t gate, int64_t linear, int64_t to) {
          for_wide_vectors<T>(
              block, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
                const auto order = any_order(lanes);
                const auto value =
                    op.forward(load(in + gate + i, order), load(in + linear + i, order));
                store(out + to + i, times(value, scale), order, false);
              });
        });
      }
    });
  });
}

void scaled_glu_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x,
                         const void* scales, void* grad_x, void* grad_scales, void* y, int64_t rows,
                         int64_t h) {
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_scaled_glu<Acc<T>>(glu, [&](auto op) {
      for (int64_t r = 0; r < rows; ++r) {
        const T *grads = as<T>(grad_y) + r * h, *in = as<T>(x) + 2 * r * h;
        T* out = as<T>(grad_x) + 2 * r * h;
        T* values = y == nullptr ? nullptr : as<T>(y) + r * h;
        const Acc<T> scale = as<Acc<T>>(scales)[r];
        RowSum<T> sum;
        const auto run = [&](int64_t gate, int64_t linear, int64_t from) {
          for_wide_vectors<T>(
              block, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
                const auto order = any_order(lanes);
                const auto grad = load(grads + from + i, order);
                const auto a = load(in + gate + i, order), b = load(in + linear + i, order);
                const auto value = op.forward(a, b);
                const auto both = op.backward(times(grad, scale), a, b);
                sum.add(grad * value);
                if (values != nullptr) store(values + from + i, times(value, scale), order, false);
                store(out + gate + i, both.gate, order, false);
                store(out + linear + i, both.linear, order, false);
              });
        };
        if (h > 0) for_each_run(block, 1, h, run);
        sum.write(grad_scales == nullptr ? nullptr : as<Acc<T>>(grad_scales) + r);
      }
    });
  });
}

void scaled_srelu_forward(DType dtype, const void* x, const void* scales, void* y, int64_t rows,
                          int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* in = as<T>(x) + r * h;
      T* out = as<T>(y) + r * h;
      const Acc<T> scale = as<Acc<T>>(scales)[r];
      for_wide_vectors<T>(
          h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
            const auto order = any_order(lanes);
            store(out + i, times(math::SReLU().forward(load(in + i, order)), scale), order, false);
          });
    }
  });
}

void scaled_srelu_backward(DType dtype, const void* grad_y, const void* x, const void* scales,
                           void* grad_x, void* grad_scales, void* y, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const math::SReLU op;
    for (int64_t r = 0; r < rows; ++r) {
      const T *grads = as<T>(grad_y) + r * h, *in = as<T>(x) + r * h;
      T* out = as<T>(grad_x) + r * h;
      T* values = y == nullptr ? nullptr : as<T>(y) + r * h;
      const Acc<T> scale = as<Acc<T>>(scales)[r];
      RowSum<T> sum;
      for_wide_vectors<T>(
          h, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
            const auto order = any_order(lanes);
            const auto grad = load(grads + i, order), at = load(in + i, order);
            const auto value = op.forward(at);
            const auto result = op.backward(times(grad, scale), at);
            sum.add(grad * value);
            if (values != nullptr) store(values + i, times(value, scale), order, false);
            store(out + i, result, order, false);
          });
      sum.write(grad_scales == nullptr ? nullptr : as<Acc<T>>(grad_scales) + r);
    }
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(scaled_glu_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(scaled_glu_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(scaled_srelu_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(scaled_srelu_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
