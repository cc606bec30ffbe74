// The threads that share a row.
#pragma once

#include "kernels/cuda/device.h"

namespace transformer_ops::cuda {
namespace {

// This thread's position among the threads that share a row.
struct Lane {
  int lanes, number;
  int row;  // among the rows that the block processes side by side

  __device__ __forceinline__ explicit Lane(int lanes)
      : lanes(lanes),
        number(static_cast<int>(threadIdx.x) % lanes),
        row(static_cast<int>(threadIdx.x) / lanes) {}

  // Calls f(column) for this thread's packs of a row of h elements.
  template <int N, class Index, class F>
  __device__ __forceinline__ void for_packs(Index h, const F& f) const {
#pragma unroll 4
    for (Index column = number * N; column < h; column += lanes * N) f(column);
  }

  // Combines the values of the lanes of a row, for each of its threads, in an order that depends
  // only on their number. `shared` must be memory that the last call did not use. All threads of
  // the row's warps take part.
  template <bool OneRow, int Count, class A, class Combine>
  __device__ __forceinline__ void combine(A (&values)[Count], A (*shared)[kWarp],
                                          const Combine& with) const {
    for (int distance = (lanes < kWarp ? lanes : kWarp) / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        values[i] = with(values[i], __shfl_xor_sync(0xffffffffu, values[i], distance));
      }
    }
    if (lanes <= kWarp) return;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) shared[i][warp] = values[i];
    }
    if constexpr (OneRow) {
      __syncthreads();
    } else {
      wait_for_threads(1 + row, lanes);
    }
    const int warps = lanes / kWarp, first = OneRow ? 0 : row * warps;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      A total = shared[i][first];
      for (int other = 1; other < warps; ++other) total = with(total, shared[i][first + other]);
      values[i] = total;
    }
  }

  template <bool OneRow, int Count, class A>
  __device__ __forceinline__ void sum(A (&sums)[Count], A (*shared)[kWarp]) const {
    combine<OneRow>(sums, shared, [](A a, A b) { return a + b; });
  }
};

}  // namespace
}  // namespace transformer_ops::cuda
