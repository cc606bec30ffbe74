// The largest magnitude of numbers, with vectors. The bits have the same order as the magnitudes,
// and NaN is last.
#pragma once

#include "kernels/encoding.h"
#include "lanes.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

namespace encoding = transformer_ops::encoding;

template <class T>
struct MagnitudeOf {
  using type = uint16_t;
};
template <>
struct MagnitudeOf<float> {
  using type = uint32_t;
};
template <class T>
using Magnitude = typename MagnitudeOf<T>::type;

template <class Bits>
TRANSFORMER_OPS_INLINE Bits larger(Bits a, Bits b) {
  return a > b ? a : b;
}

#if defined(__AVX2__)
TRANSFORMER_OPS_INLINE uint32_t largest_lane(__m128i x, uint16_t) {
  const __m128i inverted = _mm_xor_si128(x, _mm_set1_epi16(-1));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(inverted))) & 0xffff;
}
TRANSFORMER_OPS_INLINE uint32_t largest_lane(__m128i x, uint32_t) {
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
}
template <class Bit>
TRANSFORMER_OPS_INLINE uint32_t largest_lane(__m256i x, Bit bit) {
  typedef Bit Half __attribute__((vector_size(16)));
  const auto low = (Half)_mm256_castsi256_si128(x), high = (Half)_mm256_extracti128_si256(x, 1);
  return largest_lane((__m128i)larger(low, high), bit);
}
#endif
#if defined(__aarch64__)
TRANSFORMER_OPS_INLINE uint32_t largest_lane(uint16x8_t x, uint16_t) { return vmaxvq_u16(x); }
TRANSFORMER_OPS_INLINE uint32_t largest_lane(uint32x4_t x, uint32_t) { return vmaxvq_u32(x); }
#endif
#if defined(__AVX512F__)
template <class Bit>
TRANSFORMER_OPS_INLINE uint32_t largest_lane(__m512i x, Bit bit) {
  typedef Bit Half __attribute__((vector_size(32)));
  const auto low = (Half)half_of<0>(x), high = (Half)half_of<1>(x);
  return largest_lane((__m256i)larger(low, high), bit);
}
#endif

template <class T>
TRANSFORMER_OPS_INLINE uint32_t largest_magnitude(const T* x, int64_t n) {
  using Bit = Magnitude<T>;
  typedef Bit Bits __attribute__((vector_size(kVectorBytes)));
  constexpr int64_t kLanes = kVectorBytes / sizeof(Bit);
  constexpr auto kAll = static_cast<Bit>(static_cast<Bit>(~Bit{0}) >> 1);
  uint32_t best = 0;
  int64_t i = 0;
  if (n >= kLanes) {
    Bits first = load_unaligned<Bits>(x) & kAll, second = Bits{};
    for (i = kLanes; i + 2 * kLanes <= n; i += 2 * kLanes) {
      first = larger(first, load_unaligned<Bits>(x + i) & kAll);
      second = larger(second, load_unaligned<Bits>(x + i + kLanes) & kAll);
    }
    if (i + kLanes <= n) {
      second = larger(second, load_unaligned<Bits>(x + i) & kAll);
      i += kLanes;
    }
    first = larger(first, second);
#if defined(__AVX512F__)
    best = largest_lane((__m512i)first, Bit());
#elif defined(__AVX2__)
    best = largest_lane((__m256i)first, Bit());
#elif defined(__aarch64__)
    best = largest_lane(first, Bit());
#else
    for (int64_t lane = 0; lane < kLanes; ++lane) best = first[lane] > best ? first[lane] : best;
#endif
  }
#if defined(__AVX2__)
  // Blocks of 16 short numbers are smaller than a vector.
  typedef Bit Few __attribute__((vector_size(16)));
  constexpr int64_t kFew = 16 / sizeof(Bit);
  if (i + kFew <= n) {
    Few most = {};
    for (; i + kFew <= n; i += kFew) most = larger(most, load_unaligned<Few>(x + i) & kAll);
    best = larger(best, largest_lane((__m128i)most, Bit()));
  }
#endif
  for (; i < n; ++i) {
    Bit bits;
    memcpy(&bits, x + i, sizeof(bits));
    bits &= kAll;
    best = bits > best ? bits : best;
  }
  return best;
}

TRANSFORMER_OPS_INLINE float number_of(uint32_t magnitude, BFloat16) {
  return bits_float(magnitude << 16);
}
TRANSFORMER_OPS_INLINE float number_of(uint32_t magnitude, float) { return bits_float(magnitude); }

// Returns NaN if any number is NaN, and 0 if there are no numbers.
template <class T>
TRANSFORMER_OPS_INLINE float largest_of(const T* x, int64_t n) {
  return number_of(largest_magnitude(x, n), T{});
}

// Replaces each number of `best` by the magnitude in x if that is larger, or NaN.
template <class T>
TRANSFORMER_OPS_INLINE void keep_larger(const T* x, float* best, int64_t n) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Ints magnitude = (Ints)load(x + i).native & 0x7fffffff;
    store(best + i, Vec<float>((Floats)larger(magnitude, (Ints)load(best + i).native)));
  }
  for (; i < n; ++i) {
    const uint32_t magnitude = float_bits(to_float(x[i])) & encoding::kMagnitude;
    best[i] = bits_float(larger(magnitude, float_bits(best[i])));
  }
}

template <class Bits, class T>
TRANSFORMER_OPS_INLINE void keep_larger_lanes(const T* x, Magnitude<T>* best) {
  constexpr auto kAll = static_cast<Magnitude<T>>(static_cast<Magnitude<T>>(~Magnitude<T>{0}) >> 1);
  const Bits most = larger(load_unaligned<Bits>(x) & kAll, load_unaligned<Bits>(best));
  memcpy(best, &most, sizeof(most));
}
// The same for magnitudes as bits.
template <class T>
TRANSFORMER_OPS_INLINE void keep_larger_bits(const T* x, Magnitude<T>* best, int64_t n) {
  typedef Magnitude<T> Bits __attribute__((vector_size(kVectorBytes)));
  typedef Magnitude<T> One __attribute__((vector_size(sizeof(Magnitude<T>))));
  constexpr int64_t kLanes = kVectorBytes / sizeof(Magnitude<T>);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) keep_larger_lanes<Bits>(x + i, best + i);
  for (; i < n; ++i) keep_larger_lanes<One>(x + i, best + i);
}

}  // namespace
}  // namespace transformer_ops::cpu
