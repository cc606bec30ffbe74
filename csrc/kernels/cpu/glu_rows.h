// Gated linear units: y = act(gate) * linear. Gate and linear are the halves of a row, or
// alternating blocks of `interleave` elements.
#pragma once

#include "loops.h"

namespace transformer_ops::cpu {
namespace {

// A row is two short alternating runs, and the hardware's prefetching stops at the end of each.
// This prefetches the next row; past the last row it does nothing useful.
template <class T>
TRANSFORMER_OPS_INLINE void prefetch_next_row(const T* gate, const T* linear, int64_t block) {
  prefetch<Wide<T>::kLanes>(gate + 2 * block);
  prefetch<Wide<T>::kLanes>(linear + 2 * block);
}

// Calls f(first element of gate, of linear, of y) for the contiguous runs of all rows.
template <class F>
void for_each_run(int64_t block, int64_t rows, int64_t h, F f) {
  for (int64_t y = 0; y < rows * h; y += block) f(2 * y, 2 * y + block, y);
}

// Calls also(i, both gradients, lanes) for each vector. WideOrder is the order of wide vectors:
// WideLanes, or AnyOrder.
template <class WideOrder, class T, class Op, class Also>
void glu_backward_run(Op op, bool stream, const T* grad_y, const T* gate, const T* linear,
                      T* grad_gate, T* grad_linear, int64_t n, Also also) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
  const auto grads = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    return op.backward(load(grad_y + i, lanes), load(gate + i, lanes), load(linear + i, lanes));
  };
  int64_t i = 0;
  for (; i + Wide<T>::kLanes <= n; i += Wide<T>::kLanes) {
    prefetch_next_row(gate + i, linear + i, n);
    prefetch<Wide<T>::kLanes>(grad_y + i + n);
    const auto both = grads(i, WideOrder());
    store(grad_gate + i, both.gate, WideOrder(), stream);
    store(grad_linear + i, both.linear, WideOrder(), stream);
    also(i, both, WideOrder());
  }
  for (; i < n; i += kLanes) {
    const FirstLanes lanes{smaller(kLanes, n - i)};
    const auto both = grads(i, lanes);
    store(grad_gate + i, both.gate, lanes);
    store(grad_linear + i, both.linear, lanes);
    also(i, both, lanes);
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
