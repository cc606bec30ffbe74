// Backward of a function and its value again, in one pass: what the backward of a product after it
// needs.
#pragma once

#include "elementwise.h"
#include "glu.h"
#include "rows.h"

namespace transformer_ops::cpu {
namespace {

template <bool kSums, class T, class Op>
void value_and_backward_rows(Op op, T* buffer, const T* x, T* grad_x, void* grad_bias, int64_t rows,
                             int64_t n, int64_t stride) {
  ColumnSums<Acc<T>, AnyOrderOf<T>> sums(grad_bias, kSums ? n : 0);
  Acc<T>* sum = sums.group();
  for (int64_t r = 0; r < rows; ++r) {
    T* both = buffer + r * n;
    const T* in = x + r * stride;
    T* out = grad_x + r * stride;
    for_wide_vectors<T>(
        n, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto grad = load(static_cast<const T*>(both) + i, any_order(lanes));
          const auto value = load(in + i, any_order(lanes));
          const auto result = op.backward(grad, value);
          store(both + i, op.forward(value), any_order(lanes), false);
          store(out + i, result, any_order(lanes), false);
          if constexpr (kSums) store_acc(sum + i, load_acc<T>(sum + i, lanes) + result, lanes);
        });
    if constexpr (kSums) sums.end_row();
  }
}

void activation_value_and_backward(Activation activation, DType dtype, void* buffer, const void* x,
                                   void* grad_x, void* grad_bias, int64_t rows, int64_t n,
                                   int64_t stride) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      const auto pass = grad_bias != nullptr ? value_and_backward_rows<true, T, decltype(op)>
                                             : value_and_backward_rows<false, T, decltype(op)>;
      pass(op, as<T>(buffer), as<T>(x), as<T>(grad_x), grad_bias, rows, n, stride);
    });
  });
}

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

}  // namespace
}  // namespace transformer_ops::cpu
