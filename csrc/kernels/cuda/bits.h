// y[i] = f(x[i], bit i), with the bits of 8 elements in a byte: a thread processes such groups.
#pragma once

#include "kernels/cuda/column_geometry.h"
#include "kernels/cuda/device.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kGroup = 8;
constexpr int kGroupsAThread = 2;

// The number of elements of group g, 0 to 8. Only the last group may be partial.
TRANSFORMER_OPS_DEVICE int group_size(int64_t g, int64_t n) {
  const int64_t left = n - g * kGroup;
  return left >= kGroup ? kGroup : left > 0 ? static_cast<int>(left) : 0;
}

template <bool Aligned, class T>
TRANSFORMER_OPS_DEVICE Pack<T, kGroup> load_group(const T* from, int count) {
  if (count == kGroup) return load<Aligned, kGroup>(from);
  Pack<T, kGroup> pack = {};
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (j < count) pack[j] = from[j];
  }
  return pack;
}

template <bool Aligned, class T>
TRANSFORMER_OPS_DEVICE void store_group(T* to, const Pack<T, kGroup>& pack, int count) {
  if (count == kGroup) return store<Aligned, kGroup>(to, pack);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (j < count) to[j] = pack[j];
  }
}

// The last byte may lack its upper bits.
TRANSFORMER_OPS_DEVICE unsigned lowest_bits(unsigned bits, int count) {
  return bits & ((1u << count) - 1);
}

// x * scale where bit j is set, else 0, even if x is NaN or infinite.
template <class A>
TRANSFORMER_OPS_DEVICE A scale_where_set(A x, A scale, unsigned bits, int j) {
  return (bits >> j & 1) != 0 ? x * scale : A(0);
}

// ---- the source, the meaning and the destination of a group's bits

// Sets the bits where the gradient will pass. NaN passes, as in torch.
template <class A>
struct ReluWithMask {
  uint8_t* mask;

  __device__ __forceinline__ unsigned before(int64_t) const { return 0; }
  __device__ __forceinline__ A each(A x, unsigned& bits, int j) const {
    const bool blocked = x <= A(0);
    bits |= static_cast<unsigned>(!blocked) << j;
    return blocked ? A(0) : x;
  }
  __device__ __forceinline__ void after(int64_t g, unsigned bits) const {
    if (mask != nullptr) mask[g] = static_cast<uint8_t>(bits);
  }
};

template <class A>
struct ScaleWhereSet {
  const uint8_t* mask;
  A scale;

  __device__ __forceinline__ unsigned before(int64_t g) const { return mask[g]; }
  __device__ __forceinline__ A each(A x, unsigned bits, int j) const {
    return scale_where_set(x, scale, bits, j);
  }
  __device__ __forceinline__ void after(int64_t, unsigned) const {}
};

template <bool Aligned, class T, class Body>
__global__ void __launch_bounds__(kElementThreads)
    groups_kernel(Body body, const T* x, T* y, int64_t n) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kGroupsAThread * kElementThreads) +
                        static_cast<int64_t>(threadIdx.x);
  Pack<T, kGroup> in[kGroupsAThread];
  unsigned bits[kGroupsAThread];
#pragma unroll
  for (int k = 0; k < kGroupsAThread; ++k) {
    const int64_t g = first + k * kElementThreads;
    const int count = group_size(g, n);
    if (count == 0) continue;
    in[k] = load_group<Aligned>(x + g * kGroup, count);
    bits[k] = body.before(g);
  }
#pragma unroll
  for (int k = 0; k < kGroupsAThread; ++k) {
    const int64_t g = first + k * kElementThreads;
    const int count = group_size(g, n);
    if (count == 0) continue;
    Pack<T, kGroup> out;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      out[j] = round_to<T>(body.each(to_acc(in[k][j]), bits[k], j));
    }
    store_group<Aligned>(y + g * kGroup, out, count);
    body.after(g, lowest_bits(bits[k], count));
  }
}

template <class T, class Body>
void map_groups(Stream stream, const Body& body, const void* x, void* y, int64_t n) {
  const auto kernel =
      aligned16(x, y) ? groups_kernel<true, T, Body> : groups_kernel<false, T, Body>;
  constexpr int64_t kElementsABlock = kGroup * kGroupsAThread * kElementThreads;
  launch(stream, {ceil_div(n, kElementsABlock), kElementThreads}, kernel, body,
         static_cast<const T*>(x), static_cast<T*>(y), n);
}

}  // namespace
}  // namespace transformer_ops::cuda
