// CUDA's execution model on the CPU: the threads of a block are fibers, and blocks run one after
// another. Between barriers, threads run in a changing order, so that a missing barrier is
// detected.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define TRANSFORMER_OPS_SHARED(T, name) T* const name = static_cast<T*>(emulated::shared_memory())

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline uint3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

float __half2float(__half x);
__half __float2half_rn(float x);
float __bfloat162float(__nv_bfloat16 x);
__nv_bfloat16 __float2bfloat16_rn(float x);

namespace emulated {

// The memory is filled with NaN before each block.
void* shared_memory();
void run(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel);

void wait_for_block();
void wait_for_warp();
// Waits until `threads` threads are at a barrier of this number.
void wait_for_threads(int barrier, int threads);

// Copies to shared memory: some are done at once, and some not before they are waited for.
void copy_async(void* to, const void* from, int bytes);
void commit_copies();
// Waits until all but the last `pending` groups are done.
void wait_for_copies(int pending);

// The 8 bytes that each thread shows to its warp.
void* slot(unsigned thread);

template <class T>
T from_lane(T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(slot(threadIdx.x), &value, sizeof(T));
  wait_for_warp();
  std::memcpy(&value, slot(threadIdx.x / 32 * 32 + lane % 32), sizeof(T));
  wait_for_warp();
  return value;
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __syncwarp(unsigned = ~0u) { emulated::wait_for_warp(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::from_lane(value, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::from_lane(value, static_cast<unsigned>(lane));
}
// A lane past the end keeps its own value.
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulated::from_lane(value, lane + distance < 32 ? lane + distance : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) {
    bits |= static_cast<unsigned>(__shfl_sync(~0u, predicate != 0, lane)) << lane;
  }
  return bits;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
// Threads switch only at barriers, so this is atomic.
inline int atomicMax(int* address, int value) {
  const int before = *address;
  if (value > before) *address = value;
  return before;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
