// Bias and gated linear unit in one pass.
#pragma once

#include "glu.h"

namespace transformer_ops::cpu {
namespace {

// x + bias, rounded to T: what backward reads is what forward computed with. `kept` may be null.
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

}  // namespace
}  // namespace transformer_ops::cpu
