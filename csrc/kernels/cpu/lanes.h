// Parts of vectors: loads and stores at the end of an array, and lanes selected by bits.
#pragma once

#include "simd.h"

namespace transformer_ops::cpu {
namespace {

// ---- loads and stores of the first lanes; the others load as zero ----

#if defined(__AVX512F__)
TRANSFORMER_OPS_INLINE __mmask16 lane_mask(FirstLanes lanes) {
  return static_cast<__mmask16>((1u << lanes.count) - 1);
}
#endif

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> load(const T* p, FirstLanes lanes) {
#if defined(__AVX512F__)
  if constexpr (__is_same(T, float)) {
    return {(Floats)_mm512_maskz_loadu_ps(lane_mask(lanes), p)};
  } else if constexpr (__is_same(T, double)) {
    return {(typename Vec<T>::Native)_mm512_maskz_loadu_pd(lane_mask(lanes), p)};
  } else {
    alignas(32) T buffer[Vec<T>::kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffer),
                       _mm256_maskz_loadu_epi16(lane_mask(lanes), p));
    return load(buffer);
  }
#else
  T buffer[Vec<T>::kLanes] = {};
  for (int64_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
  return load(buffer);
#endif
}

template <class T>
TRANSFORMER_OPS_INLINE void store(T* p, Vec<T> x, FirstLanes lanes) {
#if defined(__AVX512F__)
  if constexpr (__is_same(T, float)) {
    _mm512_mask_storeu_ps(p, lane_mask(lanes), (__m512)x.native);
  } else if constexpr (__is_same(T, double)) {
    _mm512_mask_storeu_pd(p, lane_mask(lanes), (__m512d)x.native);
  } else {
    alignas(32) T buffer[Vec<T>::kLanes];
    store(buffer, x);
    _mm256_mask_storeu_epi16(p, lane_mask(lanes), load_unaligned<__m256i>(buffer));
  }
#else
  T buffer[Vec<T>::kLanes];
  store(buffer, x);
  for (int64_t i = 0; i < lanes.count; ++i) p[i] = buffer[i];
#endif
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> load_acc(const Acc<T>* p, FirstLanes lanes) {
  return {load<Acc<T>>(p, lanes).native};
}
template <class T>
TRANSFORMER_OPS_INLINE void store_acc(Acc<T>* p, Vec<T> x, FirstLanes lanes) {
  store<Acc<T>>(p, Vec<Acc<T>>(x.native), lanes);
}

// x in lanes inside the array, else zero.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> inside(Vec<T> x, AllLanes) {
  return x;
}
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> inside(Vec<T> x, FirstLanes lanes) {
  typename Vec<T>::Bits index;
  for (int i = 0; i < Vec<T>::kLanes; ++i) index[i] = i;
  return {(typename Vec<T>::Native)(to_bits(x) &
                                    (index < static_cast<typename Vec<T>::Bit>(lanes.count)))};
}

// ---- bits: bit i for lane i ----

template <class A>
TRANSFORMER_OPS_INLINE uint64_t bits_of(Mask<A> mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return _mm512_movepi32_mask((__m512i)mask.native);
  if constexpr (sizeof(A) == 8) return _mm512_movepi64_mask((__m512i)mask.native);
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    return static_cast<uint64_t>(_mm256_movemask_ps((__m256)mask.native));
  } else {
    return static_cast<uint64_t>(_mm256_movemask_pd((__m256d)mask.native));
  }
#elif defined(__SSE2__)
  if constexpr (sizeof(A) == 4) {
    return static_cast<uint64_t>(_mm_movemask_ps((__m128)mask.native));
  } else {
    return static_cast<uint64_t>(_mm_movemask_pd((__m128d)mask.native));
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(A) == 4) {
    return vaddvq_u32((uint32x4_t)(mask.native & Ints{1, 2, 4, 8}));
  } else {
    return vaddvq_u64((uint64x2_t)(mask.native & Longs{1, 2}));
  }
#else
  uint64_t bits = 0;
  for (int i = 0; i < kVectorBytes / static_cast<int>(sizeof(A)); ++i) {
    bits |= static_cast<uint64_t>(mask.native[i] & 1) << i;
  }
  return bits;
#endif
}

// x in the lanes whose bit is set, else zero.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> where_bits(uint64_t bits, Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (__is_same(T, double)) {
    return {(typename Vec<T>::Native)_mm512_maskz_mov_pd(static_cast<__mmask8>(bits),
                                                         (__m512d)x.native)};
  } else {
    return {(Floats)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)x.native)};
  }
#else
  using Bits = typename Vec<T>::Bits;
  Bits bit;
  for (int i = 0; i < Vec<T>::kLanes; ++i) bit[i] = 1 << i;
  const Bits all = Bits{} + static_cast<typename Vec<T>::Bit>(bits & 0xff);
  return {(typename Vec<T>::Native)(to_bits(x) & ((all & bit) == bit))};
#endif
}

// ---- halves ----

#if defined(__AVX512F__)
// The masked form is used, because gcc 12 warns about an uninitialized value in the plain one.
template <int which>
TRANSFORMER_OPS_INLINE __m256i half_of(__m512i x) {
  return _mm512_maskz_extracti64x4_epi64(0xf, x, which);
}
#endif

}  // namespace
}  // namespace transformer_ops::cpu
