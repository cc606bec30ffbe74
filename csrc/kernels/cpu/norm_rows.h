// Code shared by the norms: optional parameters, what backward adds, and the norm of a sum.
#pragma once

#include "rows.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

template <class A>
A reciprocal_root(double x) {
  return static_cast<A>(1.0 / math::sqrt(x));
}

// Calls f(is there a gamma?, is there a beta?), with types as arguments.
template <class F>
TRANSFORMER_OPS_INLINE void with_present(const void* gamma, const void* beta, F f) {
  if (gamma == nullptr)
    return beta == nullptr ? f(Bool<false>(), Bool<false>()) : f(Bool<false>(), Bool<true>());
  return beta == nullptr ? f(Bool<true>(), Bool<false>()) : f(Bool<true>(), Bool<true>());
}

// Backward processes two rows at a time, so that the sums over rows are loaded and stored less
// often. With more rows, the second pass would find less in the first-level cache.
constexpr int kRowsAtOnce = 2;

// What backward adds to grad_x: rows of the residual's gradient, or nothing. grad_x then has their
// type (T, or acc).
template <class R>
struct Residual {
  using Element = R;
  static constexpr bool kPresent = true;
  const R* rows;
};
template <class T>
struct NoResidual {
  using Element = T;
  static constexpr bool kPresent = false;
};

template <class T, class Extra, class V, class Lanes>
TRANSFORMER_OPS_INLINE void store_gradient(Extra residual, typename Extra::Element* grad_x,
                                           int64_t at, V grad, Lanes lanes, bool stream) {
  if constexpr (!Extra::kPresent) {
    store(grad_x + at, grad, lanes, stream);
  } else if constexpr (__is_same(T, typename Extra::Element)) {
    store(grad_x + at, grad + load(residual.rows + at, lanes), lanes, stream);
  } else {
    store_acc(grad_x + at, grad + load_acc<T>(residual.rows + at, lanes), lanes);
  }
}

// gamma, or one if there is none.
template <bool kGamma, class T>
struct Weight {
  const Acc<T>* gamma;

  template <class V, class Lanes>
  TRANSFORMER_OPS_INLINE V times(V grad, int64_t i, Lanes lanes) const {
    if constexpr (kGamma) return grad * load_acc<T>(gamma + i, lanes);
    return grad;
  }
  template <class V, class Lanes>
  TRANSFORMER_OPS_INLINE V times_plus(V grad, V rest, int64_t i, Lanes lanes) const {
    if constexpr (kGamma) return fused(grad, load_acc<T>(gamma + i, lanes), rest);
    return grad + rest;
  }
};

// Calls f with a Residual of the type of residual and grad_x: T, or acc.
template <class T, class F>
void with_residual(const void* residual, bool wide, F f) {
  if (wide) return f(Residual<Acc<T>>{as<Acc<T>>(residual)});
  f(Residual<T>{as<T>(residual)});
}

// Computes the sum of a few rows at a time, rounded to T, which is still in the cache when
// norm(sum, first row, rows) reads it. A null sum is not written.
template <class T, class Norm>
void add_norm_tiles(const T* x, const T* extra, T* sum, int64_t rows, int64_t h, Norm norm) {
  constexpr int64_t kTile = 8192;
  const int64_t tile = 0 < h && h < kTile ? kTile / h : 1;
  Scratch<T> scratch(sum == nullptr ? tile * h : 0);
  for (int64_t r = 0; r < rows; r += tile) {
    const int64_t count = smaller(tile, rows - r);
    T* to = sum == nullptr ? scratch.data() : sum + r * h;
    map(
        to, count * h, [](auto a, auto b) __attribute__((always_inline)) { return a + b; },
        x + r * h, extra + r * h);
    norm(to, r, count);
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
