// Vector conversion of numbers to codes, bitwise as the formulas of kernels/encoding.h. decoding.h
// has the inverse.
#pragma once

#include "magnitude.h"

namespace transformer_ops::cpu {
namespace {

namespace encoding = transformer_ops::encoding;

// What is known about scaled numbers: nothing, or that they are finite, not above the largest
// code's value and, except for integers, scaled without rounding.
enum class Known { Nothing, Fits };

TRANSFORMER_OPS_INLINE Ints round_to_int(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (Ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
  return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
  return (Ints)(x + 0x1.8p23f) << 10 >> 10;
#endif
}

// Returns a 32-bit code for each lane; integers have their sign.
template <class E, Known known>
TRANSFORMER_OPS_INLINE Ints encode_lanes(Floats x, Floats scale) {
  using V = Vec<float>;
  if constexpr (E::kInteger) {
    V scaled(x * scale);
    if constexpr (known == Known::Nothing) {
      scaled = select(scaled == scaled, scaled, V(0.0f));
      scaled = at_least(at_most(scaled, E::kLargest), -E::kLargest);
    }
    return round_to_int(scaled.native);
  } else if constexpr (!E::kFloat) {
    const Floats scaled = x * scale;
    Ints code = {};
    for (uint32_t i = 0; i < 15; ++i) code -= (Ints)(scaled > encoding::nf4_tie(i) + Floats{});
    return code;
  } else {
    constexpr auto kLeast = static_cast<int32_t>(encoding::kLeastExponent<E>);
    constexpr auto kToLast = static_cast<int32_t>(encoding::kToLastBit<E>);
    constexpr int kShift = 23 - E::kMantissa;
    const Ints sign = ((Ints)x >> (E::kSign == 0x80 ? 24 : 28)) & static_cast<int32_t>(E::kSign);
    V magnitude((Floats)((Ints)x & 0x7fffffff) * scale);
    const auto is_number = magnitude == magnitude;
    if constexpr (known == Known::Nothing) magnitude = at_most(magnitude, E::kLargest);
    const Ints exponent =
        larger((Ints)magnitude.native & static_cast<int32_t>(encoding::kInfinity), kLeast + Ints{});
    const Ints addend = exponent + kToLast;
    const Ints units = (Ints)(magnitude.native + (Floats)addend) - addend;
    Ints code = units + (exponent >> kShift) - (kLeast >> kShift);
    if constexpr (known == Known::Nothing) {
      code = is_number.native ? code : static_cast<int32_t>(E::kNanCode) + Ints{};
    }
    return code | sign;
  }
}

// Stores the lowest bytes of two vectors, one after the other.
template <class E>
TRANSFORMER_OPS_INLINE void store_bytes(uint8_t* p, Ints a, Ints b) {
#if defined(__AVX512F__)
  auto* to = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(to, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)a));
  _mm_storeu_si128(to + 1, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)b));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packs_epi32((__m256i)a, (__m256i)b);
  const __m256i words = _mm256_permute4x64_epi64(pairs, 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  const __m128i bytes = E::kInteger ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#elif defined(__SSE2__)
  const __m128i words = _mm_packs_epi32((__m128i)a, (__m128i)b);
  const __m128i bytes =
      E::kInteger ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
#elif defined(__aarch64__)
  const uint16x8_t words = vcombine_u16(vmovn_u32((uint32x4_t)a), vmovn_u32((uint32x4_t)b));
  vst1_u8(p, vmovn_u16(words));
#else
  constexpr int kLanes = kVectorBytes / 4;
  for (int i = 0; i < kLanes; ++i) {
    p[i] = static_cast<uint8_t>(a[i]);
    p[i + kLanes] = static_cast<uint8_t>(b[i]);
  }
#endif
}

// Stores the codes of the numbers of two vectors.
template <class E, Known known, class T>
TRANSFORMER_OPS_INLINE void encode_two(const T* x, uint8_t* codes, Floats scale) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
#if defined(__AVX512F__)
  if constexpr (__is_same(T, BFloat16)) {
    // This processes every second number at a time, as in wide.h, so that no lane is widened or
    // moved.
    const Ints both = load_unaligned<Ints>(x);
    const Ints even = encode_lanes<E, known>((Floats)(both << 16), scale);
    const Ints odd =
        encode_lanes<E, known>((Floats)(both & static_cast<int32_t>(0xffff0000)), scale);
    const Ints pairs = (E::kInteger ? even & 0xff : even) | odd << 8;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                        _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)pairs));
    return;
  }
#endif
  const Ints a = encode_lanes<E, known>(load(x).native, scale);
  store_bytes<E>(codes, a, encode_lanes<E, known>(load(x + kLanes).native, scale));
}

#if defined(__AVX512F__)
// Encodes bfloat16 numbers times a power of two, whose exponent is subtracted with `offset`, by
// rounding the numbers' 16 bits. Returns false, with nothing done, if a code is subnormal.
template <class E>
TRANSFORMER_OPS_INLINE bool encode_normal(const BFloat16* x, uint8_t* codes, __m512i offset) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  constexpr int kDropped = 7 - E::kMantissa;
  constexpr uint16_t kBelowHalf = (1 << (kDropped - 1)) - 1, kSign = E::kSign;
  const auto numbers = load_unaligned<Words>(x);
  const Words magnitude = numbers & 0x7fff;
  const auto scaled = (Words)_mm512_subs_epu16((__m512i)magnitude, offset);
  const auto small = _mm512_cmplt_epu16_mask((__m512i)scaled, _mm512_set1_epi16(1 << 7));
  if (_mm512_mask_test_epi16_mask(small, (__m512i)magnitude, (__m512i)magnitude) != 0) return false;
  const Words odd = scaled >> kDropped & 1;
  const Words rounded = (scaled + kBelowHalf + odd) >> kDropped;
  const Words code = rounded | (numbers >> 8 & kSign);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm512_maskz_cvtepi16_epi8(0xffffffff, (__m512i)code));
  return true;
}
#endif

// Encodes as many groups of two vectors as there are; returns the number of codes.
template <class E, Known known, class T>
TRANSFORMER_OPS_INLINE int64_t encode_groups(const T* x, uint8_t* codes, int64_t n, float scale) {
  constexpr int64_t kTwo = 2 * Vec<T>::kLanes;
  const Floats scales = scale + Floats{};
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (__is_same(T, BFloat16) && known == Known::Fits && E::kFloat) {
    const int exponent = static_cast<int>(float_bits(scale) >> 23) - 127;
    const int offset = (126 + E::kLeast - exponent) << 7;
    // A negative offset could turn subnormal numbers into normal ones.
    if (offset > 0) {
      const __m512i offsets = _mm512_set1_epi16(static_cast<int16_t>(offset));
      for (; i + kTwo <= n; i += kTwo) {
        if (encode_normal<E>(x + i, codes + i, offsets)) continue;
        encode_two<E, known>(x + i, codes + i, scales);
      }
    }
  }
#endif
  for (; i + kTwo <= n; i += kTwo) encode_two<E, known>(x + i, codes + i, scales);
  return i;
}

// Stores one byte for each code.
template <class E, Known known, class T>
TRANSFORMER_OPS_INLINE void encode_bytes(const T* x, uint8_t* codes, int64_t n, float scale) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
  int64_t i = encode_groups<E, known>(x, codes, n, scale);
  if (i + kLanes <= n) {
    const Ints one = encode_lanes<E, known>(load(x + i).native, scale + Floats{});
    uint8_t twice[2 * kLanes];
    store_bytes<E>(twice, one, one);
    memcpy(codes + i, twice, kLanes);
    i += kLanes;
  }
  for (; i < n; ++i) codes[i] = static_cast<uint8_t>(encoding::encode<E>(to_float(x[i]), scale));
}

// The same for numbers that each have a scale.
template <class E, class T>
TRANSFORMER_OPS_INLINE void encode_bytes(const T* x, uint8_t* codes, int64_t n,
                                         const float* scales) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
  const auto encode = [&](int64_t i) {
    return encode_lanes<E, Known::Nothing>(load(x + i).native, load(scales + i).native);
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    store_bytes<E>(codes + i, encode(i), encode(i + kLanes));
  }
  for (; i < n; ++i) {
    codes[i] = static_cast<uint8_t>(encoding::encode<E>(to_float(x[i]), scales[i]));
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
