// Bias and gated linear unit in one pass.
#pragma once

#include "glu.h"

namespace transformer_ops::cpu {
namespace {

// x + bias, rounded to T: what backward reads is what forward computed with. `kept` may be null.
template <class T>
TRANSFORMER_OPS_INLINE const Acc<T>* add_bias(const T* x, const Acc<T>* bias, T* kept,
                                              Acc<T>* buffer, int64_t n) {
  const Acc<T>* in = load(x, buffer, n);
  Acc<T>* sum = kept == nullptr ? buffer : staging(kept, buffer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] = in[i] + bias[i];
  if constexpr (!kIsAcc<T>) {
    T rounded[kBlock];
    T* to = kept == nullptr ? rounded : kept;
    from_acc(sum, to, n);
    to_acc(to, buffer, n);
  }
  return sum;
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
      for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t to, int64_t n) {
        alignas(64) A buffer_gate[kBlock];
        alignas(64) A buffer_linear[kBlock];
        const auto half = [=](int64_t from, A* buffer) {
          return add_bias(in + from, b + from % (2 * h), sum == nullptr ? nullptr : sum + from,
                          buffer, n);
        };
        const A* g = half(gate, buffer_gate);
        const A* l = half(linear, buffer_linear);
        A* staged = staging(out + to, buffer_gate);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) staged[i] = op.forward(g[i], l[i]);
        store(staged, out + to, n);
      });
    });
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
