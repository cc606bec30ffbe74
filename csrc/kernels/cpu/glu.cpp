// Gated linear units, alone and after a bias.
#include "kernels/glu.h"

#include "glu_rows.h"
#include "kernels/choose.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_glu;

template <class T, class Op>
void glu_forward_runs(Op op, bool stream, int64_t block, const T* x, T* y, int64_t rows,
                      int64_t h) {
  const auto f = [=](auto gate, auto linear) __attribute__((always_inline)) {
    return op.forward(gate, linear);
  };
  for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t to) {
    const T *gates = x + gate, *linears = x + linear;
    int64_t i = 0;
    for (; i + Wide<T>::kLanes <= block; i += Wide<T>::kLanes) {
      prefetch_next_row(gates + i, linears + i, block);
      const auto out = f(load(gates + i, AnyOrder()), load(linears + i, AnyOrder()));
      store(y + to + i, out, AnyOrder(), stream);
    }
    if (i < block) map_rest(y + to + i, block - i, f, gates + i, linears + i);
  });
}

template <class T, class Op>
void glu_backward_runs(Op op, bool stream, int64_t block, const T* grad_y, const T* x, T* grad_x,
                       int64_t rows, int64_t h) {
  for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t from) {
    glu_backward_run<AnyOrder>(op, stream, grad_y + from, x + gate, x + linear, grad_x + gate,
                               grad_x + linear, block, [](auto...) {});
  });
}

// Returns x + bias rounded to T, so that backward reads the same numbers that forward used. `kept`
// may be null.
template <class T, class Lanes>
TRANSFORMER_OPS_INLINE auto add_bias(const T* x, const Acc<T>* bias, T* kept, Lanes lanes) {
  const auto sum = load(x, lanes) + load_acc<T>(bias, lanes);
  if (kept != nullptr) store(kept, sum, lanes, false);
  if constexpr (kIsAcc<T>) {
    return sum;
  } else {
    T rounded[Wide<T>::kLanes];
    store(rounded, sum, lanes, false);
    return load(static_cast<const T*>(rounded), lanes);
  }
}

namespace entry {

void glu_forward(const Glu& glu, DType dtype, const void* x, void* y, int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      const int64_t size = sizeof(T);
      const bool stream = streams(y, rows * h * size, block * size);
      glu_forward_runs(op, stream, block, as<T>(x), as<T>(y), rows, h);
      if (stream) finish_streaming();
    });
  });
}

void glu_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x, void* grad_x,
                  int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      const int64_t size = sizeof(T);
      const bool stream = streams(grad_x, 2 * rows * h * size, block * size);
      glu_backward_runs(op, stream, block, as<T>(grad_y), as<T>(x), as<T>(grad_x), rows, h);
      if (stream) finish_streaming();
    });
  });
}

void bias_glu_forward(const Glu& glu, DType dtype, const void* x, const void* bias, void* kept,
                      void* y, int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_glu<A>(glu, [&](auto op) {
      const T* in = as<T>(x);
      const A* b = as<A>(bias);
      T* sum = as<T>(kept);
      T* out = as<T>(y);
      for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t to) {
        for_wide_vectors<T>(
            block, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
              const auto half = [=](int64_t from) __attribute__((always_inline)) {
                return add_bias(in + from, b + from % (2 * h),
                                sum == nullptr ? nullptr : sum + from, lanes);
              };
              store(out + to + i, op.forward(half(gate + i), half(linear + i)), lanes, false);
            });
      });
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(glu_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(glu_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(bias_glu_forward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
