// Code shared by both variants of a norm's backward: the formulas, over packs of a row.
#pragma once

#include "kernels/cuda/norm.h"

namespace transformer_ops::cuda {

// For rows that are too long for registers: reads x and grad_y separately for the sums over rows,
// for those over a row, and for the gradient. The sums over rows, if wanted, go to norm.partials.
// `aligned`: rows are aligned to 16 bytes.
void norm_backward_of_long_rows(Stream stream, const NormBackward& norm, bool aligned);

namespace {

template <class A, int N>
TRANSFORMER_OPS_DEVICE Pack<A, N> gamma_or_ones(const NormBackward& norm, int64_t column) {
  if (norm.gamma.data != nullptr) return elements<A, N>(norm.gamma, column);
  Pack<A, N> ones;
#pragma unroll
  for (int i = 0; i < N; ++i) ones[i] = A(1);
  return ones;
}

template <class A>
struct Statistics {
  A mean = 0, rstd = 0;
};

// Zero past the last row.
template <class A>
TRANSFORMER_OPS_DEVICE Statistics<A> statistics_of(const NormBackward& norm, int64_t row) {
  if (row >= norm.rows) return {};
  return {norm.mean != nullptr ? static_cast<const A*>(norm.mean)[row] : A(0),
          static_cast<const A*>(norm.rstd)[row]};
}

// Adds to the sums over a row: that of grad_n n and, if there are two, that of grad_n.
template <class T, int N, int Count>
TRANSFORMER_OPS_DEVICE void add_to_row(Acc<T> (&sums)[Count], const Pack<T, N>& grad_y,
                                       const Pack<T, N>& x, const Pack<Acc<T>, N>& gamma,
                                       const Statistics<Acc<T>>& row) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Acc<T> grad_n = to_acc(grad_y[i]) * gamma[i];
    sums[0] += grad_n * math::normalized(to_acc(x[i]), row.mean, row.rstd);
    if constexpr (Count == 2) sums[1] += grad_n;
  }
}

// The factor of the sums over a row that math::normalized_backward takes.
template <class A>
TRANSFORMER_OPS_DEVICE A mean_factor(const NormBackward& norm) {
  return norm.norm == Norm::L2 ? A(1) : A(1) / static_cast<A>(norm.h);
}

// Adds to the sums over rows for the gradients of gamma and beta.
template <class T, int N>
TRANSFORMER_OPS_DEVICE void add_to_gamma(Pack<Acc<T>, N>& sums, const Pack<T, N>& grad_y,
                                         const Pack<T, N>& x, const Statistics<Acc<T>>& row) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sums[i] += to_acc(grad_y[i]) * math::normalized(to_acc(x[i]), row.mean, row.rstd);
  }
}
template <class T, int N>
TRANSFORMER_OPS_DEVICE void add_to_beta(Pack<Acc<T>, N>& sums, const Pack<T, N>& grad_y) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] += to_acc(grad_y[i]);
}

// Is grad_x of acc type, but not x?
inline bool is_wide(const NormBackward& norm) { return norm.residual_dtype != norm.dtype; }

// grad_x = the norm's gradient + residual, from element `at` on. `residual` has x's type, and is
// not read if grad_x is wide.
template <class T, int N, int Count>
TRANSFORMER_OPS_DEVICE void store_gradient(const NormBackward& norm, bool wide, int64_t at,
                                           const Pack<T, N>& grad_y, const Pack<T, N>& x,
                                           const Pack<Acc<T>, N>& gamma,
                                           const Statistics<Acc<T>>& row,
                                           const Acc<T> (&means)[Count], const T* residual) {
  using A = Acc<T>;
  Pack<A, N> grad;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A n = math::normalized(to_acc(x[i]), row.mean, row.rstd);
    const A mean_grad = Count == 2 ? means[Count - 1] : A(0);
    grad[i] =
        math::normalized_backward(to_acc(grad_y[i]) * gamma[i], n, row.rstd, mean_grad, means[0]);
  }
  if constexpr (!std::is_same_v<T, A>) {
    if (wide) {
      if (norm.residual != nullptr) {
        const auto more = load_pack<N>(static_cast<const A*>(norm.residual) + at);
#pragma unroll
        for (int i = 0; i < N; ++i) grad[i] += more[i];
      }
      return store_pack(static_cast<A*>(norm.grad_x) + at, grad);
    }
  }
  if (norm.residual != nullptr) {
    const auto more = load_pack<N>(residual);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] += to_acc(more[i]);
  }
  Pack<T, N> rounded;
#pragma unroll
  for (int i = 0; i < N; ++i) rounded[i] = round_to<T>(grad[i]);
  store_pack(static_cast<T*>(norm.grad_x) + at, rounded);
}

TRANSFORMER_OPS_MATH int wanted_gradients(const NormBackward& norm) {
  return (norm.grad_gamma.data != nullptr) + (norm.grad_beta.data != nullptr);
}

}  // namespace
}  // namespace transformer_ops::cuda
