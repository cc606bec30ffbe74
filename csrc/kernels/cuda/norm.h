// Code shared by the kernels of norms: rows distributed over threads, and parameters.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/lane.h"
#include "kernels/math.h"
#include "kernels/norm.h"

namespace transformer_ops::cuda {
namespace {

// Packs are 16 bytes, or single elements if rows are not aligned.
template <int N, class T>
TRANSFORMER_OPS_DEVICE Pack<T, N> load_pack(const T* from) {
  return load<(N > 1), N>(from);
}
template <int N, class T>
TRANSFORMER_OPS_DEVICE void store_pack(T* to, const Pack<T, N>& pack) {
  store<(N > 1), N>(to, pack);
}
// Stores a pack in shared memory.
template <int N, class T>
TRANSFORMER_OPS_DEVICE void keep_pack(T* to, const Pack<T, N>& pack) {
#if defined(__CUDA_ARCH__)
  if constexpr (N > 1) {  // as in store_word
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    uint4 words[sizeof(pack) / 16];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 16); ++i) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address + 16 * i),
                   "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w)
                   : "memory");
    }
  } else {
    *to = pack[0];
  }
#else
  for (int i = 0; i < N; ++i) to[i] = pack[i];
#endif
}
// Copies a pack from global to shared memory; it has arrived once this thread has waited for
// copies.
template <int N, class T>
TRANSFORMER_OPS_DEVICE void copy_pack(T* to, const T* from) {
  if constexpr (N > 1) {
    copy_async(to, from);
  } else {
    *to = *from;
  }
}

template <class A, class G, int N>
TRANSFORMER_OPS_DEVICE Pack<A, N> load_converted(const void* from, int64_t column, double add) {
  const Pack<G, N> pack = load_pack<N>(static_cast<const G*>(from) + column);
  Pack<A, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = static_cast<A>(to_acc(pack[i])) + static_cast<A>(add);
  return result;
}

// Elements column to column + N of a parameter. The branch is the same for all threads.
template <class A, int N>
TRANSFORMER_OPS_DEVICE Pack<A, N> elements(const Vector& vector, int64_t column) {
  switch (vector.dtype) {
    case DType::Float32:
      return load_converted<A, float, N>(vector.data, column, vector.add);
    case DType::Float64:
      return load_converted<A, double, N>(vector.data, column, vector.add);
    case DType::Float16:
      return load_converted<A, Half, N>(vector.data, column, vector.add);
    case DType::BFloat16:
      break;
  }
  return load_converted<A, BFloat16, N>(vector.data, column, vector.add);
}

// n gamma + beta for normalized numbers.
template <class T, int N>
TRANSFORMER_OPS_DEVICE Pack<T, N> normalized_output(const Pack<T, N>& x, Acc<T> mean, Acc<T> rstd,
                                                    const Vector& gamma, const Vector& beta,
                                                    int64_t column) {
  using A = Acc<T>;
  Pack<A, N> n;
#pragma unroll
  for (int i = 0; i < N; ++i) n[i] = math::normalized(to_acc(x[i]), mean, rstd);
  if (gamma.data != nullptr) {
    const Pack<A, N> scale = elements<A, N>(gamma, column);
#pragma unroll
    for (int i = 0; i < N; ++i) n[i] *= scale[i];
  }
  if (beta.data != nullptr) {
    const Pack<A, N> shift = elements<A, N>(beta, column);
#pragma unroll
    for (int i = 0; i < N; ++i) n[i] += shift[i];
  }
  Pack<T, N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = round_to<T>(n[i]);
  return y;
}

}  // namespace
}  // namespace transformer_ops::cuda
