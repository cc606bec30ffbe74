// Vectors in the compute type: arithmetic, comparisons, and loads and stores that convert.
//
// Vec<T> holds numbers of storage type T as acc values. T is part of the type, so that functions of
// 16-bit numbers may be cheaper than those of float (simd_math.h).
#pragma once

#include "dtype.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace transformer_ops::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#define TRANSFORMER_OPS_VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef float Floats TRANSFORMER_OPS_VECTOR(kVectorBytes);
typedef double Doubles TRANSFORMER_OPS_VECTOR(kVectorBytes);
typedef double DoublesOfFloats TRANSFORMER_OPS_VECTOR(2 * kVectorBytes);
typedef int32_t Ints TRANSFORMER_OPS_VECTOR(kVectorBytes);
typedef int64_t Longs TRANSFORMER_OPS_VECTOR(kVectorBytes);
#undef TRANSFORMER_OPS_VECTOR

// The vector types of an acc type: its bits, and its lanes as double.
template <class A>
struct VectorsOf {
  using Native = Floats;
  using Bit = int32_t;
  using Bits = Ints;
  using Wide = DoublesOfFloats;
};
template <>
struct VectorsOf<double> {
  using Native = Doubles;
  using Bit = int64_t;
  using Bits = Longs;
  using Wide = Doubles;
};

// The true lanes have all bits set.
template <class A>
struct Mask {
  typename VectorsOf<A>::Bits native;

  friend TRANSFORMER_OPS_INLINE Mask operator&(Mask a, Mask b) { return {a.native & b.native}; }
};

template <class T>
struct Vec {
  using Element = T;
  using One = Vec;
  using A = Acc<T>;
  using Native = typename VectorsOf<A>::Native;
  using Bit = typename VectorsOf<A>::Bit;
  using Bits = typename VectorsOf<A>::Bits;
  static constexpr int64_t kLanes = kVectorBytes / sizeof(A);

  Native native;

  Vec() = default;
  TRANSFORMER_OPS_INLINE Vec(Native lanes) : native(lanes) {}
  TRANSFORMER_OPS_INLINE explicit Vec(A x) : native(x - Native{}) {}

#define TRANSFORMER_OPS_OPERATOR(op) \
  friend TRANSFORMER_OPS_INLINE Vec operator op(Vec a, Vec b) { return {a.native op b.native}; }
  TRANSFORMER_OPS_OPERATOR(+)
  TRANSFORMER_OPS_OPERATOR(-)
  TRANSFORMER_OPS_OPERATOR(*)
  TRANSFORMER_OPS_OPERATOR(/)
#undef TRANSFORMER_OPS_OPERATOR
  friend TRANSFORMER_OPS_INLINE Vec operator-(Vec a) { return {-a.native}; }

#define TRANSFORMER_OPS_COMPARISON(op) \
  friend TRANSFORMER_OPS_INLINE Mask<A> operator op(Vec a, Vec b) { return {a.native op b.native}; }
  TRANSFORMER_OPS_COMPARISON(<)
  TRANSFORMER_OPS_COMPARISON(<=)
  TRANSFORMER_OPS_COMPARISON(>)
  TRANSFORMER_OPS_COMPARISON(==)
#undef TRANSFORMER_OPS_COMPARISON

  friend TRANSFORMER_OPS_INLINE Vec select(Mask<A> mask, Vec a, Vec b) {
    return {mask.native ? a.native : b.native};
  }
};

template <class T>
TRANSFORMER_OPS_INLINE typename Vec<T>::Bits to_bits(Vec<T> x) {
  return (typename Vec<T>::Bits)x.native;
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> abs(Vec<T> x) {
  using Bit = typename Vec<T>::Bit;
  constexpr Bit kMagnitude = static_cast<Bit>(~(uint64_t{1} << (8 * sizeof(Bit) - 1)));
  return {(typename Vec<T>::Native)(to_bits(x) & kMagnitude)};
}

// The lanes of a vector that are inside the array.
struct AllLanes {};
struct FirstLanes {
  int64_t count;  // from 1 to kLanes
};

// ---- loads and stores of whole vectors ----

template <class N, class T>
TRANSFORMER_OPS_INLINE N load_unaligned(const T* p) {
  N lanes;
  memcpy(&lanes, p, sizeof(N));
  return lanes;
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> load(const T* p, AllLanes = {}) {
  if constexpr (kIsAcc<T>) {
    return {load_unaligned<typename Vec<T>::Native>(p)};
  } else {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (__is_same(T, Half)) {
      return {(Floats)_mm512_maskz_cvtph_ps(0xffff, half)};
    } else {
      return {(Floats)((Ints)_mm512_maskz_cvtepu16_epi32(0xffff, half) << 16)};
    }
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (__is_same(T, Half)) {
      return {(Floats)_mm256_cvtph_ps(half)};
    } else {
      return {(Floats)((Ints)_mm256_cvtepu16_epi32(half) << 16)};
    }
#elif defined(__aarch64__)
    const auto half = load_unaligned<uint16x4_t>(p);
    if constexpr (__is_same(T, Half)) {
      return {(Floats)vcvt_f32_f16(vreinterpret_f16_u16(half))};
    } else {
      return {(Floats)vshll_n_u16(half, 16)};
    }
#else
    alignas(kVectorBytes) float lanes[Vec<T>::kLanes];
    for (int i = 0; i < Vec<T>::kLanes; ++i) lanes[i] = to_float(p[i]);
    return {load_unaligned<Floats>(lanes)};
#endif
  }
}

// Loads acc numbers, such as gamma, for use with numbers of T.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> load_acc(const Acc<T>* p, AllLanes = {}) {
  return {load_unaligned<typename Vec<T>::Native>(p)};
}
template <class T>
TRANSFORMER_OPS_INLINE void store_acc(Acc<T>* p, Vec<T> x, AllLanes = {}) {
  memcpy(p, &x.native, sizeof(x.native));
}

#if defined(__AVX2__)

#if defined(__AVX512F__)

// The order in which two vectors are stored: one after the other, or alternating number by number.
enum class Order { Consecutive, Alternating };

template <Order order>
struct HalvesOf {
  alignas(64) uint16_t lower[32];
  constexpr HalvesOf() : lower() {
    for (int i = 0; i < 32; ++i) {
      lower[i] =
          static_cast<uint16_t>(order == Order::Consecutive ? 2 * i : i / 2 * 2 + i % 2 * 32);
    }
  }
};

// The bfloat16 nearest to each number of two vectors, ties to even. Rounding works on the 16-bit
// halves: a bit of their average says whether the lower ones carry. Saturation keeps NaN with a
// full payload from becoming zero.
template <Order order = Order::Consecutive>
TRANSFORMER_OPS_INLINE __m512i round_to_bfloat16(Floats a, Floats b) {
  static constexpr HalvesOf<order> kHalves;
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i lower_halves = _mm512_load_si512(kHalves.lower);
  const __m512i upper_halves = _mm512_add_epi16(lower_halves, one);
  const __m512i lower = _mm512_permutex2var_epi16((__m512i)a, lower_halves, (__m512i)b);
  const __m512i upper = _mm512_permutex2var_epi16((__m512i)a, upper_halves, (__m512i)b);
  const __m512i odd = (__m512i)((Ints)upper & (Ints)one);
  const __m512i addend = _mm512_add_epi16(odd, _mm512_set1_epi16(0x7ffe));
  const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(lower, addend), 15);
  return _mm512_adds_epu16(_mm512_min_epi16(upper, _mm512_set1_epi16(0x7ffe)), carry);
}

#else

// The bfloat16 nearest to each number, ties to even, in the upper half of its lane. The minima keep
// NaN with a full payload from being rounded up to zero.
TRANSFORMER_OPS_INLINE Ints round_to_bfloat16(Floats x) {
  const __m256i positive = _mm256_min_epi32((__m256i)x, _mm256_set1_epi32(0x7fff7fff));
  const auto bits =
      (Ints)_mm256_min_epu32(positive, _mm256_set1_epi32(static_cast<int32_t>(0xffff7fff)));
  const Ints odd = (Ints)_mm256_srli_epi32((__m256i)bits, 16) & 1;
  return bits + 0x7fff + odd;
}

#endif

#elif defined(__aarch64__)

TRANSFORMER_OPS_INLINE uint16x4_t to_short(Floats x, Half) {
  return vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
}
// The bfloat16 nearest to each number, ties to even. NaN stays one, and quiet.
TRANSFORMER_OPS_INLINE uint16x4_t to_short(Floats x, BFloat16) {
  const Ints bits = (Ints)x, odd = (bits >> 16) & 1;
  return vshrn_n_u32((uint32x4_t)(x == x ? bits + 0x7fff + odd : bits | 0x400000), 16);
}

#endif

// `stream` bypasses the caches; p must then be aligned to a vector.
template <class N>
TRANSFORMER_OPS_INLINE void store_native(void* p, N lanes, [[maybe_unused]] bool stream) {
#if defined(__SSE2__)
  if (stream) {
    if constexpr (sizeof(N) == 16) _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)lanes);
#if defined(__AVX2__)
    if constexpr (sizeof(N) == 32) _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)lanes);
#endif
#if defined(__AVX512F__)
    if constexpr (sizeof(N) == 64) _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)lanes);
#endif
    return;
  }
#endif
  memcpy(p, &lanes, sizeof(N));
}

// Stores two vectors in consecutive memory.
template <class T>
TRANSFORMER_OPS_INLINE void store_two(T* p, Vec<T> a, Vec<T> b, bool stream) {
  if constexpr (kIsAcc<T>) {
    store_native(p, a.native, stream);
    store_native(p + Vec<T>::kLanes, b.native, stream);
  } else {
#if defined(__AVX512F__)
    if constexpr (__is_same(T, Half)) {
      store_native(p, _mm512_maskz_cvtps_ph(0xffff, (__m512)a.native, 0), stream);
      store_native(p + 16, _mm512_maskz_cvtps_ph(0xffff, (__m512)b.native, 0), stream);
    } else {
      store_native(p, round_to_bfloat16(a.native, b.native), stream);
    }
#elif defined(__AVX2__)
    if constexpr (__is_same(T, Half)) {
      store_native(p, _mm256_cvtps_ph((__m256)a.native, 0), stream);
      store_native(p + 8, _mm256_cvtps_ph((__m256)b.native, 0), stream);
    } else {
      const __m256i low = _mm256_srli_epi32((__m256i)round_to_bfloat16(a.native), 16);
      const __m256i high = _mm256_srli_epi32((__m256i)round_to_bfloat16(b.native), 16);
      const __m256i both = _mm256_packus_epi32(low, high);
      store_native(p, _mm256_permute4x64_epi64(both, 0xd8), stream);
    }
#elif defined(__aarch64__)
    store_native(p, vcombine_u16(to_short(a.native, T()), to_short(b.native, T())), stream);
#else
    alignas(kVectorBytes) float lanes[2 * Vec<T>::kLanes];
    store_acc<T>(lanes, a);
    store_acc<T>(lanes + Vec<T>::kLanes, b);
    alignas(kVectorBytes) T out[2 * Vec<T>::kLanes];
    for (int i = 0; i < 2 * Vec<T>::kLanes; ++i) from_float(lanes[i], out[i]);
    store_native(p, load_unaligned<Floats>(out), stream);
#endif
  }
}

template <class T>
TRANSFORMER_OPS_INLINE void store(T* p, Vec<T> x, AllLanes = {}) {
  if constexpr (kIsAcc<T>) {
    store_acc<T>(p, x);
  } else {
#if defined(__AVX512F__)
    if constexpr (__is_same(T, Half)) {
      store_native(p, _mm512_maskz_cvtps_ph(0xffff, (__m512)x.native, 0), false);
    } else {
      const __m512i twice = round_to_bfloat16(x.native, x.native);
      memcpy(p, &twice, sizeof(twice) / 2);
    }
#else
    T both[2 * Vec<T>::kLanes];
    store_two(both, x, x, false);
    memcpy(p, both, sizeof(both) / 2);
#endif
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
