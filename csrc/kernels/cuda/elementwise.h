// y[i] = op(x[i]...), in packs of N adjacent elements.
#pragma once

#include "kernels/cuda/column_geometry.h"
#include "kernels/cuda/compute.h"

namespace transformer_ops::cuda {
namespace {

// Inputs of the same size.
template <class T, int Count>
struct Arrays {
  const T* data[Count];
};

// The number of 16-byte loads in flight in a thread, as many as a copy needs on H100. (4.8 TB/s at
// 800 ns are 30 KB for a multiprocessor, which may have fewer than 2048 threads if a kernel needs
// registers.)
constexpr int kLoadsInFlight = 4;

// Single elements are small, so a thread has more of them in flight.
template <int N, int Inputs>
constexpr int kPacksAThread = N == 1 ? 8 / Inputs : kLoadsInFlight / Inputs;

template <class Op, class T>
TRANSFORMER_OPS_DEVICE T apply(const Op& op, T x) {
  return round_to<T>(to_acc(op(to_compute(x))));
}
template <class Op, class T>
TRANSFORMER_OPS_DEVICE T apply(const Op& op, T a, T b) {
  return round_to<T>(to_acc(op(to_compute(a), to_compute(b))));
}

template <int N, int Inputs, class T, class Op>
__global__ void __launch_bounds__(kElementThreads)
    map_kernel(Op op, Arrays<T, Inputs> in, T* out, int64_t n) {
  constexpr int kPacks = kPacksAThread<N, Inputs>;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kPacks * kElementThreads * N);
  const int64_t first = block + static_cast<int64_t>(threadIdx.x) * N;
  Pack<T, N> x[kPacks][Inputs];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t i = first + k * kElementThreads * N;
    if (i + N > n) continue;
#pragma unroll
    for (int a = 0; a < Inputs; ++a) x[k][a] = load<true, N>(in.data[a] + i);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t i = first + k * kElementThreads * N;
    if (i + N > n) continue;
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Inputs == 1) {
        y[j] = apply(op, x[k][0][j]);
      } else {
        y[j] = apply(op, x[k][0][j], x[k][1][j]);
      }
    }
    store<true, N>(out + i, y);
  }
  if constexpr (N > 1) {
    const int64_t i = n / N * N + static_cast<int64_t>(threadIdx.x);
    if (blockIdx.x + 1 == gridDim.x && i < n) {
      if constexpr (Inputs == 1) {
        out[i] = apply(op, in.data[0][i]);
      } else {
        out[i] = apply(op, in.data[0][i], in.data[1][i]);
      }
    }
  }
}

template <class T, int Inputs, class Op>
void map(Stream stream, const Op& op, const Arrays<T, Inputs>& in, T* out, int64_t n) {
  const auto run = [&](auto kernel, int64_t elements_a_thread) {
    launch(stream, {ceil_div(n, elements_a_thread * kElementThreads), kElementThreads}, kernel, op,
           in, out, n);
  };
  constexpr int N = kVector<T>;
  if (aligned16(in.data[0], in.data[Inputs - 1], out)) {
    run(map_kernel<N, Inputs, T, Op>, N * kPacksAThread<N, Inputs>);
  } else {
    run(map_kernel<1, Inputs, T, Op>, kPacksAThread<1, Inputs>);
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
