// Code shared by kernels that round numbers: packs of 8 adjacent numbers, their largest magnitudes,
// and the values of codes.
#pragma once

#include "kernels/cuda/bits.h"
#include "kernels/encoding.h"

namespace transformer_ops::cuda {
namespace {

using kernel::Element;

constexpr int kPack = kGroup;

template <class F>
void with_element(Element element, const F& f) {
  using namespace encoding;
  switch (element) {
    case Element::E4M3:
      return f(Type<E4M3>());
    case Element::E5M2:
      return f(Type<E5M2>());
    case Element::E2M1:
      return f(Type<E2M1>());
    case Element::NF4:
      return f(Type<NF4>());
    case Element::Int8:
      return f(Type<Int8>());
  }
}

// Does the element type have formats that choose a scale?
template <class E>
constexpr bool kMayChoose = std::is_same_v<E, encoding::E2M1>;

// ---- magnitudes as bits, which have the same order as the floats; NaN is above all

TRANSFORMER_OPS_DEVICE float to_number(double x) { return encoding::to_odd(x); }
template <class T>
TRANSFORMER_OPS_DEVICE float to_number(T x) {
  return to_acc(x);
}

TRANSFORMER_OPS_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

template <class T>
TRANSFORMER_OPS_DEVICE uint32_t largest_of(const Pack<T, kPack>& x) {
  uint32_t best = 0;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    best = larger(best, encoding::bits_of(to_number(x[j])) & encoding::kMagnitude);
  }
  return best;
}

// Every thread of a full warp gets the largest magnitude of its group of `lanes`, a power of two.
TRANSFORMER_OPS_DEVICE uint32_t largest_of_lanes(uint32_t x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// Every thread of the block gets the largest magnitude; `shared` has a word for each of its full
// warps.
TRANSFORMER_OPS_DEVICE uint32_t largest_of_block(uint32_t x, uint32_t* shared) {
  x = largest_of_lanes(x, kWarp);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) x = larger(x, shared[warp]);
  return x;
}

constexpr int64_t kSharedWords = kElementThreads / kWarp * static_cast<int64_t>(sizeof(uint32_t));

TRANSFORMER_OPS_DEVICE int count_of(int64_t column, int64_t end) {
  const int64_t left = end - column;
  return left >= kPack ? kPack : left > 0 ? static_cast<int>(left) : 0;
}

// ---- the values of codes

template <class T>
TRANSFORMER_OPS_DEVICE T scaled(float value, float scale) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>(value) * static_cast<double>(scale);
  } else {
    return round_to<T>(encoding::product(value, scale));
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
