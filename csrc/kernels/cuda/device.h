// The base of every kernel file: dtypes, vector loads, sums over warps and blocks, launches.
//
// tests/emulated compiles the same files for the CPU, where threads are fibers. Anything outside
// CUDA's common subset is therefore wrapped here.
#pragma once

#if defined(TRANSFORMER_OPS_EMULATED)
#include "emulate.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Memory whose size the launch gives, 16-byte aligned.
#define TRANSFORMER_OPS_SHARED(T, name)                    \
  extern __shared__ __align__(16) unsigned char name##_[]; \
  T* const name = reinterpret_cast<T*>(name##_)
#endif

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda.h"
#include "kernels/cuda/errors.h"

#define TRANSFORMER_OPS_DEVICE static __device__ __forceinline__

namespace transformer_ops::cuda {
namespace {

// ---- dtypes

using Half = __half;
using BFloat16 = __nv_bfloat16;

template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

TRANSFORMER_OPS_DEVICE float to_acc(float x) { return x; }
TRANSFORMER_OPS_DEVICE double to_acc(double x) { return x; }
TRANSFORMER_OPS_DEVICE float to_acc(Half x) { return __half2float(x); }
TRANSFORMER_OPS_DEVICE float to_acc(BFloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even.
template <class T, class A>
TRANSFORMER_OPS_DEVICE T round_to(A x) {
  if constexpr (std::is_same_v<T, Half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>()) for the T of a dtype.
template <class F>
void dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::Float32:
      return f(Type<float>());
    case DType::Float64:
      return f(Type<double>());
    case DType::Float16:
      return f(Type<Half>());
    case DType::BFloat16:
      return f(Type<BFloat16>());
  }
}

// ---- memory

// The number of elements in 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// N consecutive elements.
template <class T, int N>
struct Pack {
  T values[N];

  __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

// Loads 16-byte words if `Aligned` says that the address is a multiple of 16 and that N elements
// fill whole words; else element by element.
template <bool Aligned, int N, class T>
TRANSFORMER_OPS_DEVICE Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
  if constexpr (Aligned && sizeof(pack) % 16 == 0) {
    uint4 words[sizeof(pack) / 16];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 16); ++i) {
      words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    memcpy(&pack, words, sizeof(pack));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack[i] = from[i];
  }
  return pack;
}

// A plain assignment becomes four stores of 4 bytes in many kernels.
TRANSFORMER_OPS_DEVICE void store_word(uint4* to, uint4 word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y),
               "r"(word.z), "r"(word.w)
               : "memory");
#else
  *to = word;
#endif
}

template <bool Aligned, int N, class T>
TRANSFORMER_OPS_DEVICE void store(T* to, const Pack<T, N>& pack) {
  if constexpr (Aligned && sizeof(pack) % 16 == 0) {
    uint4 words[sizeof(pack) / 16];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 16); ++i) {
      store_word(reinterpret_cast<uint4*>(to) + i, words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = pack[i];
  }
}

// Null pointers count as aligned.
template <class... Pointers>
bool aligned16(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Element i of a parameter. The branch is the same for all threads.
template <class A>
TRANSFORMER_OPS_DEVICE A element(const Vector& vector, int64_t i) {
  A value{};
  switch (vector.dtype) {
    case DType::Float32:
      value = static_cast<A>(static_cast<const float*>(vector.data)[i]);
      break;
    case DType::Float64:
      value = static_cast<A>(static_cast<const double*>(vector.data)[i]);
      break;
    case DType::Float16:
      value = static_cast<A>(to_acc(static_cast<const Half*>(vector.data)[i]));
      break;
    case DType::BFloat16:
      value = static_cast<A>(to_acc(static_cast<const BFloat16*>(vector.data)[i]));
      break;
  }
  return value + static_cast<A>(vector.add);
}

template <class A>
TRANSFORMER_OPS_DEVICE void set_element(const Gradient& gradient, int64_t i, A value) {
  switch (gradient.dtype) {
    case DType::Float32:
      static_cast<float*>(gradient.data)[i] = static_cast<float>(value);
      break;
    case DType::Float64:
      static_cast<double*>(gradient.data)[i] = static_cast<double>(value);
      break;
    case DType::Float16:
      static_cast<Half*>(gradient.data)[i] = round_to<Half>(value);
      break;
    case DType::BFloat16:
      static_cast<BFloat16*>(gradient.data)[i] = round_to<BFloat16>(value);
      break;
  }
}

// ---- copies to shared memory that do not wait for their data

// Copies 16 aligned bytes, which arrive by the time that their group of copies is waited for. Only
// the thread that copied may read them without a further barrier.
TRANSFORMER_OPS_DEVICE void copy_async(void* to, const void* from) {
#if defined(TRANSFORMER_OPS_EMULATED)
  emulated::copy_async(to, from, 16);
#else
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#endif
}

// Ends this thread's group of copies.
TRANSFORMER_OPS_DEVICE void commit_copies() {
#if defined(TRANSFORMER_OPS_EMULATED)
  emulated::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all but this thread's last `Pending` groups.
template <int Pending>
TRANSFORMER_OPS_DEVICE void wait_for_copies() {
#if defined(TRANSFORMER_OPS_EMULATED)
  emulated::wait_for_copies(Pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// ---- sums; the order of additions depends only on the number of threads

constexpr int kWarp = 32;

// Waits for `threads` threads in whole warps, a part of the block. Barriers are 1 to 15.
TRANSFORMER_OPS_DEVICE void wait_for_threads(int barrier, int threads) {
#if defined(TRANSFORMER_OPS_EMULATED)
  emulated::wait_for_threads(barrier, threads);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

// Every thread of a full warp gets the sum.
template <class A>
TRANSFORMER_OPS_DEVICE A warp_sum(A x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// ---- launches

constexpr int64_t kMostBlocks = 0x7fffffff;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Grid {
  int64_t blocks;  // along x; 0: no launch
  int threads;
  int64_t shared_bytes = 0;
};

inline void check(const Grid& grid) {
  if (grid.blocks > kMostBlocks) throw std::runtime_error(too_many_blocks(grid.blocks));
}

#if defined(TRANSFORMER_OPS_EMULATED)
template <class... Parameters, class... Arguments>
void launch(Stream, const Grid& grid, void (*kernel)(Parameters...), const Arguments&... args) {
  check(grid);
  emulated::run(grid.blocks, grid.threads, grid.shared_bytes, [&] { kernel(args...); });
}

inline int multiprocessors() { return 3; }
inline int64_t most_shared_bytes() { return int64_t{226} << 10; }
#else
inline void check(cudaError_t error) {
  if (error != cudaSuccess) fail(error);
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// The shared memory of a block that a launch may ask for, besides __shared__ arrays.
constexpr int64_t kStaticSharedBytes = 1 << 10;
inline int64_t most_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticSharedBytes;
}

template <class Kernel>
void ask_for_shared(Kernel kernel, int64_t bytes) {
  if (bytes + kStaticSharedBytes <= 48 << 10) return;
  // The value is always the same, because another thread may be about to launch the kernel with
  // more.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most_shared_bytes())));
}

template <class... Parameters, class... Arguments>
void launch(Stream stream, const Grid& grid, void (*kernel)(Parameters...),
            const Arguments&... args) {
  check(grid);
  ask_for_shared(kernel, grid.shared_bytes);
  if (grid.blocks == 0) return;
  // The formatter would split the closing bracket.
  // clang-format off
  kernel<<<static_cast<unsigned>(grid.blocks), grid.threads, grid.shared_bytes,
           static_cast<cudaStream_t>(stream)>>>(static_cast<Parameters>(args)...);
  // clang-format on
  // Sticky errors of earlier work are not reported here: the caller sees them when it synchronizes.
  check(cudaGetLastError());
}
#endif

}  // namespace
}  // namespace transformer_ops::cuda
