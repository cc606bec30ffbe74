// Operations on a Vec or a Wide that depend on the instruction set or on the bits of numbers.
#pragma once

#include "../math.h"
#include "wide.h"

namespace transformer_ops::cpu {
namespace {

// ---- on one vector ----

template <class V>
constexpr bool kDouble = __is_same(typename V::Element, double);
template <class V>
constexpr bool kShort = __is_same(typename V::Element, BFloat16);

template <class T, class F>
TRANSFORMER_OPS_INLINE Vec<T> each_lane(Vec<T> x, F f) {
  for (int i = 0; i < Vec<T>::kLanes; ++i) x.native[i] = f(x.native[i]);
  return x;
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> from_bits(typename Vec<T>::Bits bits) {
  return {(typename Vec<T>::Native)bits};
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> minus_abs(Vec<T> x) {
  using Bit = typename Vec<T>::Bit;
  return from_bits<T>(to_bits(x) | static_cast<Bit>(uint64_t{1} << (8 * sizeof(Bit) - 1)));
}

// a b + c, rounded once if the machine can. In a sum of two products a compiler may fuse either
// one, and differently in each copy of a loop: results would depend on how work is split.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> fused(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (kDouble<Vec<T>>) {
    return {(Doubles)_mm512_fmadd_pd((__m512d)a.native, (__m512d)b.native, (__m512d)c.native)};
  } else {
    return {(Floats)_mm512_fmadd_ps((__m512)a.native, (__m512)b.native, (__m512)c.native)};
  }
#elif defined(__FMA__) && defined(__AVX2__)
  if constexpr (kDouble<Vec<T>>) {
    return {(Doubles)_mm256_fmadd_pd((__m256d)a.native, (__m256d)b.native, (__m256d)c.native)};
  } else {
    return {(Floats)_mm256_fmadd_ps((__m256)a.native, (__m256)b.native, (__m256)c.native)};
  }
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < Vec<T>::kLanes; ++i)
    c.native[i] = math::fused(a.native[i], b.native[i], c.native[i]);
  return c;
#else
  return a * b + c;
#endif
}

// |x| with the sign of y.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> copy_sign(Vec<T> x, Vec<T> y) {
  using Bit = typename Vec<T>::Bit;
  const auto sign = static_cast<Bit>(uint64_t{1} << (8 * sizeof(Bit) - 1));
  return from_bits<T>((to_bits(x) & ~sign) | (to_bits(y) & sign));
}

// The larger of the two; NaN if x is NaN.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> at_least(Vec<T> x, double bound) {
#if defined(__AVX512F__)
  if constexpr (!__is_same(T, double)) {
    return {(Floats)_mm512_maskz_max_ps(0xffff, _mm512_set1_ps(static_cast<float>(bound)),
                                        (__m512)x.native)};
  }
#endif
  const Vec<T> limit(static_cast<Acc<T>>(bound));
  return select(x < limit, limit, x);
}

// The smaller of the two; NaN if x is NaN.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> at_most(Vec<T> x, double bound) {
#if defined(__AVX512F__)
  if constexpr (!__is_same(T, double)) {
    return {(Floats)_mm512_maskz_min_ps(0xffff, _mm512_set1_ps(static_cast<float>(bound)),
                                        (__m512)x.native)};
  }
#endif
  const Vec<T> limit(static_cast<Acc<T>>(bound));
  return select(x > limit, limit, x);
}

// a where x has a negative sign, else b.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> select_negative(Vec<T> x, Vec<T> a, Vec<T> b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (__is_same(T, double)) {
    return {(Doubles)_mm256_blendv_pd((__m256d)b.native, (__m256d)a.native, (__m256d)x.native)};
  } else {
    return {(Floats)_mm256_blendv_ps((__m256)b.native, (__m256)a.native, (__m256)x.native)};
  }
#else
  // A shift and a logical operation are used, because a comparison would occupy a multiplier's
  // unit.
  const auto negative = to_bits(x) >> (8 * sizeof(Acc<T>) - 1);
  return from_bits<T>((to_bits(a) & negative) | (to_bits(b) & ~negative));
#endif
}

template <class T>
TRANSFORMER_OPS_INLINE Vec<T> sqrt(Vec<T> x) {
  return each_lane(x, [](Acc<T> v) { return math::sqrt(v); });
}

// 2^(k - 127) from k in the lowest bits of x; zero for k = 0.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> power_from_low_bits(Vec<T> x) {
  return from_bits<T>(to_bits(x) << 23);
}

#if defined(__AVX512F__)
// x 2^floor(n), for any n.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> scale_by_floor(Vec<T> x, Vec<T> n) {
  return {(Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)x.native, (__m512)n.native)};
}
#endif

// x 2^k for integers k from -151 to 100; results below the normal range are rounded as subnormal
// numbers.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> scale_by_power(Vec<T> x, Vec<T> k) {
#if defined(__AVX512F__)
  return scale_by_floor(x, k);
#else
  // 2^(k + 24) is normal.
  const Ints exponent = __builtin_convertvector(k.native, Ints) + (127 + 24);
  return x * from_bits<T>(exponent << 23) * Vec<T>(0x1p-24f);
#endif
}

#if defined(__AVX512F__)
// x - floor(x); zero for infinity.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> fraction(Vec<T> x) {
  return {(Floats)_mm512_maskz_reduce_ps(0xffff, (__m512)x.native, _MM_FROUND_TO_NEG_INF)};
}

// The error is at most 2^-14.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> near_reciprocal(Vec<T> x) {
  return {(Floats)_mm512_maskz_rcp14_ps(0xffff, (__m512)x.native)};
}
#endif

// ---- the same on several vectors ----

template <class V, class F>
TRANSFORMER_OPS_INLINE Pair<V> each_lane(Pair<V> x, F f) {
  return {each_lane(x.low, f), each_lane(x.high, f)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> abs(Pair<V> x) {
  return {abs(x.low), abs(x.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> minus_abs(Pair<V> x) {
  return {minus_abs(x.low), minus_abs(x.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> fused(Pair<V> a, Pair<V> b, Pair<V> c) {
  return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> copy_sign(Pair<V> x, Pair<V> y) {
  return {copy_sign(x.low, y.low), copy_sign(x.high, y.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> at_least(Pair<V> x, double bound) {
  return {at_least(x.low, bound), at_least(x.high, bound)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> at_most(Pair<V> x, double bound) {
  return {at_most(x.low, bound), at_most(x.high, bound)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> select_negative(Pair<V> x, Pair<V> a, Pair<V> b) {
  return {select_negative(x.low, a.low, b.low), select_negative(x.high, a.high, b.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> sqrt(Pair<V> x) {
  return {sqrt(x.low), sqrt(x.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> power_from_low_bits(Pair<V> x) {
  return {power_from_low_bits(x.low), power_from_low_bits(x.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> scale_by_power(Pair<V> x, Pair<V> k) {
  return {scale_by_power(x.low, k.low), scale_by_power(x.high, k.high)};
}

#if defined(__AVX512F__)
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> scale_by_floor(Pair<V> x, Pair<V> n) {
  return {scale_by_floor(x.low, n.low), scale_by_floor(x.high, n.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> fraction(Pair<V> x) {
  return {fraction(x.low), fraction(x.high)};
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> near_reciprocal(Pair<V> x) {
  return {near_reciprocal(x.low), near_reciprocal(x.high)};
}
#endif

}  // namespace
}  // namespace transformer_ops::cpu
