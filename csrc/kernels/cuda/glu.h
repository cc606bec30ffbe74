// Gated linear units over rows of x, 2h wide. Gate and linear half alternate in blocks, whose size
// divides h; one block of h elements means plain halves.
#pragma once

#include "kernels/choose.h"
#include "kernels/cuda/columns.h"
#include "kernels/cuda/compute.h"

namespace transformer_ops::cuda {
namespace {

struct GluLayout {
  int64_t h, block;  // in elements
  Divisor by_block;  // a block, in packs
};

template <int N>
GluLayout glu_layout(const Glu& glu, int64_t h) {
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  return {h, block, Divisor(block / N)};
}

// A pack of columns: of y, and the two of x from which it is computed.
template <int N>
struct GluColumn {
  int64_t y, gate, linear;

  TRANSFORMER_OPS_GEOMETRY GluColumn(const GluLayout& layout, int64_t pack)
      : y(pack * N), gate(y + layout.by_block.quotient(pack) * layout.block) {
    linear = gate + layout.block;
  }

  // The columns of x that are summed: N of the gate, N of the linear half.
  TRANSFORMER_OPS_GEOMETRY int64_t sum(int k) const { return k < N ? gate + k : linear + k - N; }
};

// Single elements are small, so a thread has more of them in flight.
template <int N>
constexpr int kGluRows = N == 1 ? 4 : 2;

template <class T, int N, class Formula>
struct GluBackward {
  using Column = GluColumn<N>;
  using Sum = Acc<T>;
  static constexpr int kRows = kGluRows<N>, kSums = 2 * N;
  static constexpr int kPacksAcross = kPacksOf512Bytes<T, N>;

  struct Loads {
    Pack<T, N> grad, gate, linear;
  };

  Formula formula;
  GluLayout layout;
  const T *grad_y, *x;
  T* grad_x;

  __device__ __forceinline__ Column column(int64_t pack) const { return {layout, pack}; }

  __device__ __forceinline__ Loads load(const Column& column, int64_t row) const {
    const T* const from = x + row * (2 * layout.h);
    return {cuda::load<true, N>(grad_y + row * layout.h + column.y),
            cuda::load<true, N>(from + column.gate), cuda::load<true, N>(from + column.linear)};
  }

  template <class Add>
  __device__ __forceinline__ void finish(const Column& column, int64_t row, const Loads& loads,
                                         const Add& add) const {
    Pack<T, N> gate, linear;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto grads = formula.backward(to_compute(loads.grad[j]), to_compute(loads.gate[j]),
                                          to_compute(loads.linear[j]));
      gate[j] = round_to<T>(to_acc(grads.gate));
      linear[j] = round_to<T>(to_acc(grads.linear));
      add(j, to_acc(grads.gate));
      add(N + j, to_acc(grads.linear));
    }
    T* const to = grad_x + row * (2 * layout.h);
    store<true, N>(to + column.gate, gate);
    store<true, N>(to + column.linear, linear);
  }
};

// Calls f(body, packs in a row of y).
template <class F>
void with_glu_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x, void* grad_x,
                       int64_t h, const F& f) {
  if (h == 0) return;
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    kernel::with_glu<Acc<T>>(glu, [&](auto formula) {
      const auto run = [&](auto n) {
        constexpr int N = decltype(n)::value;
        const GluBackward<T, N, decltype(formula)> body{
            formula, glu_layout<N>(glu, h), static_cast<const T*>(grad_y), static_cast<const T*>(x),
            static_cast<T*>(grad_x)};
        f(body, h / N);
      };
      with_packs<kVector<T>>(aligned16(grad_y, x, grad_x), run, h, glu.interleave);
    });
  });
}

}  // namespace
}  // namespace transformer_ops::cuda
