// Gated linear units: y = act(gate) * linear, gate and linear in two halves of a row, or in
// alternating blocks of `interleave` elements.
#pragma once

#include "../math.h"
#include "dtype.h"

namespace transformer_ops::cpu {
namespace {

template <class A, class F>
void with_glu(const Glu& glu, F f) {
  switch (glu.kind) {
    case GluKind::GLU:
      return f(math::GatedBy<math::Sigmoid>());
    case GluKind::GEGLU:
      return f(math::GatedBy<math::GELU>());
    case GluKind::QGEGLU:
      return f(math::GatedBy<math::QGELU>());
    case GluKind::ReGLU:
      return f(math::GatedBy<math::ReLU>());
    case GluKind::SReGLU:
      return f(math::GatedBy<math::SReLU>());
    case GluKind::SwiGLU:
      return f(math::GatedBy<math::SiLU>());
    case GluKind::SiTUGLU:
      return f(math::SiTUGLU<A>{static_cast<A>(glu.beta1), static_cast<A>(glu.beta2)});
    case GluKind::ClampedSwiGLU:
      return f(math::ClampedSwiGLU<A>{static_cast<A>(glu.limit), static_cast<A>(glu.alpha),
                                      static_cast<A>(glu.offset)});
  }
}

// Calls f(first element of gate, of linear, of y, count) for contiguous runs of all rows.
template <class F>
void for_each_run(int64_t block, int64_t rows, int64_t h, F f) {
  for (int64_t y = 0; y < rows * h; y += block) {
    for (int64_t start = 0; start < block; start += kBlock) {
      const int64_t gate = 2 * y + start;
      f(gate, gate + block, y + start, smaller(kBlock, block - start));
    }
  }
}

void glu_forward(const Glu& glu, DType dtype, const void* x, void* y, int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_glu<A>(glu, [&](auto op) {
      const T* in = as<T>(x);
      T* out = as<T>(y);
      for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t to, int64_t n) {
        map(in + gate, in + linear, out + to, n, [=](A a, A b) { return op.forward(a, b); });
      });
    });
  });
}

// kSums: adds the gradients to the two sums as well.
template <bool kSums, class T, class Op>
void glu_backward_run(Op op, const T* grad_y, const T* gate, const T* linear, T* grad_gate,
                      T* grad_linear, [[maybe_unused]] Acc<T>* sum_gate,
                      [[maybe_unused]] Acc<T>* sum_linear, int64_t n) {
  alignas(64) Acc<T> buffer_g[kBlock];
  alignas(64) Acc<T> buffer_a[kBlock];
  alignas(64) Acc<T> buffer_b[kBlock];
  const Acc<T>* g = load(grad_y, buffer_g, n);
  const Acc<T>* a = load(gate, buffer_a, n);
  const Acc<T>* b = load(linear, buffer_b, n);
  Acc<T>* grad_a = staging(grad_gate, buffer_a);
  Acc<T>* grad_b = staging(grad_linear, buffer_b);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const auto grads = op.backward(g[i], a[i], b[i]);
    if constexpr (kSums) {
      sum_gate[i] += grads.gate;
      sum_linear[i] += grads.linear;
    }
    grad_a[i] = grads.gate;
    grad_b[i] = grads.linear;
  }
  store(grad_a, grad_gate, n);
  store(grad_b, grad_linear, n);
}

void glu_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x, void* grad_x,
                  int64_t rows, int64_t h) {
  if (h == 0) return;
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      const T* g = as<T>(grad_y);
      const T* in = as<T>(x);
      T* out = as<T>(grad_x);
      for_each_run(block, rows, h, [=](int64_t gate, int64_t linear, int64_t from, int64_t n) {
        glu_backward_run<false>(op, g + from, in + gate, in + linear, out + gate, out + linear,
                                nullptr, nullptr, n);
      });
    });
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
