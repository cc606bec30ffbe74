// Numbers to codes and back, by vectors: the formulas of kernels/encoding.h, bit for bit.
#pragma once

#include "kernels/encoding.h"
#include "lanes.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

namespace encoding = transformer_ops::encoding;

TRANSFORMER_OPS_INLINE float to_float(float x) { return x; }
TRANSFORMER_OPS_INLINE void from_float(float x, float& out) { out = x; }

// ---- the largest magnitude: of any dtype the bits are ordered as the magnitudes, NaN last

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
#if defined(__AVX512F__)
// By the masked form: gcc 12 warns of an uninitialized value in the plain one.
template <int which>
TRANSFORMER_OPS_INLINE __m256i half_of(__m512i x) {
  return _mm512_maskz_extracti64x4_epi64(0xf, x, which);
}
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
#else
    for (int64_t lane = 0; lane < kLanes; ++lane) best = first[lane] > best ? first[lane] : best;
#endif
  }
#if defined(__AVX2__)
  // Blocks of 16 short numbers are less than a vector.
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
TRANSFORMER_OPS_INLINE float number_of(uint32_t magnitude, Half) {
  return to_float(Half{static_cast<uint16_t>(magnitude)});
}
TRANSFORMER_OPS_INLINE float number_of(uint32_t magnitude, float) { return bits_float(magnitude); }

// NaN where there is one; 0 of nothing.
template <class T>
TRANSFORMER_OPS_INLINE float largest_of(const T* x, int64_t n) {
  return number_of(largest_magnitude(x, n), T{});
}

// Of each number the magnitude where it is the larger one, or NaN.
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
// The same of magnitudes as bits.
template <class T>
TRANSFORMER_OPS_INLINE void keep_larger_bits(const T* x, Magnitude<T>* best, int64_t n) {
  typedef Magnitude<T> Bits __attribute__((vector_size(kVectorBytes)));
  typedef Magnitude<T> One __attribute__((vector_size(sizeof(Magnitude<T>))));
  constexpr int64_t kLanes = kVectorBytes / sizeof(Magnitude<T>);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) keep_larger_lanes<Bits>(x + i, best + i);
  for (; i < n; ++i) keep_larger_lanes<One>(x + i, best + i);
}

// ---- numbers to codes

// What is known of numbers that are scaled: nothing, or that they are finite, not above the
// largest code's value and, but for integers, scaled without rounding.
enum class Known { Nothing, Fits };

TRANSFORMER_OPS_INLINE Ints round_to_int(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (Ints)_mm_cvtps_epi32((__m128)x);
#else
  return (Ints)(x + 0x1.8p23f) << 10 >> 10;
#endif
}

// In 32 bits each; integers with their sign.
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

// The lowest bytes of two vectors, one after the other.
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
#else
  constexpr int kLanes = kVectorBytes / 4;
  for (int i = 0; i < kLanes; ++i) {
    p[i] = static_cast<uint8_t>(a[i]);
    p[i + kLanes] = static_cast<uint8_t>(b[i]);
  }
#endif
}

// Codes of the numbers of two vectors.
template <class E, Known known, class T>
TRANSFORMER_OPS_INLINE void encode_two(const T* x, uint8_t* codes, Floats scale) {
  constexpr int64_t kLanes = Vec<T>::kLanes;
#if defined(__AVX512F__)
  if constexpr (__is_same(T, BFloat16)) {
    // Every second number at a time, as wide.h has them: no lane is widened or moved.
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
// Of bfloat16 numbers times a power of two whose exponent is subtracted with `offset`: rounds the
// numbers' own 16 bits. False, with nothing done, where a code is of a subnormal number.
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

// Codes as far as groups of two vectors go: how many that is.
template <class E, Known known, class T>
TRANSFORMER_OPS_INLINE int64_t encode_groups(const T* x, uint8_t* codes, int64_t n, float scale) {
  constexpr int64_t kTwo = 2 * Vec<T>::kLanes;
  const Floats scales = scale + Floats{};
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (__is_same(T, BFloat16) && known == Known::Fits && !E::kInteger) {
    const int exponent = static_cast<int>(float_bits(scale) >> 23) - 127;
    const int offset = (126 + E::kLeast - exponent) << 7;
    // Else subnormal numbers could become normal ones.
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

// One byte a code.
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

// The same, of numbers with a scale each.
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

// ---- codes to numbers

// The values of two vectors of codes, kDecodedUnit<E> times smaller.
template <class E>
constexpr float kDecodedUnit = 1.0f;

#if defined(__AVX2__)
// By way of float16, whose subnormal numbers cost nothing: those of the codes are some of them.
template <>
constexpr float kDecodedUnit<encoding::E4M3> = 256.0f;

#if defined(__AVX512F__)
using CodeBytes = __m256i;
using CodeWords = __m512i;
TRANSFORMER_OPS_INLINE CodeBytes load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
TRANSFORMER_OPS_INLINE CodeBytes load_half(const uint8_t* p) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TRANSFORMER_OPS_INLINE CodeWords widen(CodeBytes x) {
  return _mm512_maskz_cvtepi8_epi16(0xffffffff, x);
}
TRANSFORMER_OPS_INLINE void halves_to_floats(CodeWords x, Floats& a, Floats& b) {
  a = (Floats)_mm512_maskz_cvtph_ps(0xffff, half_of<0>(x));
  b = (Floats)_mm512_maskz_cvtph_ps(0xffff, half_of<1>(x));
}
TRANSFORMER_OPS_INLINE void ints_to_floats(CodeBytes x, Floats& a, Floats& b) {
  const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
  a = __builtin_convertvector((Ints)_mm512_maskz_cvtepi8_epi32(0xffff, low), Floats);
  b = __builtin_convertvector((Ints)_mm512_maskz_cvtepi8_epi32(0xffff, high), Floats);
}
TRANSFORMER_OPS_INLINE CodeBytes look_up(const uint8_t* table, CodeBytes x) {
  return _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), x);
}
#else
using CodeBytes = __m128i;
using CodeWords = __m256i;
TRANSFORMER_OPS_INLINE CodeBytes load_bytes(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
TRANSFORMER_OPS_INLINE CodeBytes load_half(const uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
TRANSFORMER_OPS_INLINE CodeWords widen(CodeBytes x) { return _mm256_cvtepi8_epi16(x); }
TRANSFORMER_OPS_INLINE void halves_to_floats(CodeWords x, Floats& a, Floats& b) {
  a = (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(x));
  b = (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
}
TRANSFORMER_OPS_INLINE void ints_to_floats(CodeBytes x, Floats& a, Floats& b) {
  a = __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(x), Floats);
  b = __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)), Floats);
}
TRANSFORMER_OPS_INLINE CodeBytes look_up(const uint8_t* table, CodeBytes x) {
  return _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table)), x);
}
#endif

// The upper bytes of E2M1's sixteen numbers in float16.
alignas(16) constexpr uint8_t kUpperBytes[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                                 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};

template <class E>
TRANSFORMER_OPS_INLINE void decode_two(CodeBytes bytes, Floats& a, Floats& b) {
  typedef int16_t Words __attribute__((vector_size(sizeof(CodeWords))));
  if constexpr (E::kInteger) {
    ints_to_floats(bytes, a, b);
  } else if constexpr (E::kMantissa == 3) {
    // One more exponent bit, and three more of the mantissa; NaN is no large number: it alone
    // carries into the highest bit of the exponent.
    const Words wide = (Words)widen(bytes) << 7;
    const Words magnitude = wide & 0x3f80;
    const Words nan = (magnitude + 0x80) & 0x4000;
    halves_to_floats((CodeWords)((wide & static_cast<int16_t>(0x8000)) | magnitude | nan), a, b);
  } else if constexpr (E::kMantissa == 2) {
    halves_to_floats((CodeWords)((Words)widen(bytes) << 8), a, b);
  } else {
    halves_to_floats((CodeWords)((Words)widen(look_up(kUpperBytes, bytes)) << 8), a, b);
  }
}
#endif

#if defined(__AVX512F__)
template <class E>
constexpr bool kShifts = false;
template <>
constexpr bool kShifts<encoding::E4M3> = true;
template <>
constexpr bool kShifts<encoding::E5M2> = true;

// Codes times a power of two as bfloat16 numbers: no product, as only the exponent changes.
template <class E>
class ShiftedCodes {
  typedef int16_t Words __attribute__((vector_size(64)));
  static constexpr int kFew = 1 << E::kMantissa, kDropped = 7 - E::kMantissa;

  // By the five lowest bits of a code: its number where it is subnormal, infinite or NaN.
  struct Table {
    alignas(64) int16_t numbers[32] = {};
    constexpr Table() {
      for (int i = 1, bit = 0; i < kFew; ++i) {
        if (i == 2 << bit) ++bit;
        numbers[i] = static_cast<int16_t>((127 + E::kLeast - E::kMantissa + bit) << 7 |
                                          (i << (7 - bit) & 0x7f));
      }
      for (uint32_t i = E::kFirstNan - E::kInfinities; i < E::kSign; ++i) {
        numbers[i % 32] = i < E::kFirstNan ? 0x7f80 : 0x7fc0;
      }
    }
  };

 public:
  // Whether scale is such a power, and no number becomes subnormal or infinite.
  static TRANSFORMER_OPS_INLINE bool fits(float scale) {
    constexpr uint32_t kLargest = E::kFirstNan - E::kInfinities - 1;
    constexpr int kMost = static_cast<int>(kLargest >> E::kMantissa) - 1 + E::kLeast;
    constexpr int kFirst = -126 - (E::kLeast - E::kMantissa), kLast = 127 - kMost;
    // Of a negative scale it is above them all.
    const int exponent = exponent_of(scale);
    return float_bits(scale) << 9 == 0 && exponent >= kFirst && exponent <= kLast;
  }

  TRANSFORMER_OPS_INLINE explicit ShiftedCodes(float scale) {
    static constexpr Table kTable;
    const auto by = static_cast<int16_t>(exponent_of(scale) * (1 << 7));
    const __m512i table = _mm512_load_si512(kTable.numbers);
    others_ = _mm512_mask_add_epi16(table, (1u << kFew) - 2, table, _mm512_set1_epi16(by));
    first_ = (Words)_mm512_set1_epi16(static_cast<int16_t>(by + ((127 + E::kLeast) << 7)));
  }

  // The numbers of 32 codes.
  TRANSFORMER_OPS_INLINE __m512i operator()(__m256i codes) const {
    constexpr int16_t kNormal = E::kFirstNan - E::kInfinities - kFew;
    const __m512i wide = _mm512_maskz_cvtepi8_epi16(0xffffffff, codes);
    const Words above = ((Words)wide & 0x7f) - static_cast<int16_t>(kFew);
    const auto other = _mm512_cmpge_epu16_mask((__m512i)above, _mm512_set1_epi16(kNormal));
    const __m512i normal = (__m512i)((above << kDropped) + first_);
    const auto magnitude = (Words)_mm512_mask_permutexvar_epi16(normal, other, wide, others_);
    return (__m512i)(magnitude | ((Words)wide & static_cast<int16_t>(0x8000)));
  }

  // How many of n codes it decodes: whole vectors.
  TRANSFORMER_OPS_INLINE int64_t operator()(const uint8_t* codes, BFloat16* out, int64_t n,
                                            bool stream) const {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) store_native(out + i, (*this)(load_bytes(codes + i)), stream);
    return i;
  }

 private:
  static TRANSFORMER_OPS_INLINE int exponent_of(float x) {
    return static_cast<int>(float_bits(x) >> 23) - 127;
  }

  __m512i others_;
  Words first_;  // the least normal number
};
#endif

// Codes of one byte each to code * scale.
template <class E, class T>
TRANSFORMER_OPS_INLINE void decode_bytes(const uint8_t* codes, T* out, int64_t n, float scale,
                                         [[maybe_unused]] bool stream) {
  int64_t i = 0;
  if constexpr (__is_same(T, double)) {
    for (; i < n; ++i) {
      out[i] = static_cast<double>(encoding::decode<E>(codes[i])) * static_cast<double>(scale);
    }
    return;
  } else {
#if defined(__AVX2__)
    constexpr int64_t kLanes = Vec<T>::kLanes;
#if defined(__AVX512F__)
    if constexpr (__is_same(T, BFloat16) && kShifts<E>) {
      if (ShiftedCodes<E>::fits(scale)) {
        i = ShiftedCodes<E>(scale)(codes, out, n, stream);
        if (i == n) return;
      }
    }
#endif
    const float unit = scale * kDecodedUnit<E>;
    const Floats units = unit - Floats{};  // not +: -0 keeps its sign
    if (!(unit > encoding::kMost)) {
      for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        Floats a, b;
        decode_two<E>(load_bytes(codes + i), a, b);
        store_two(out + i, Vec<T>(a * units), Vec<T>(b * units), stream);
      }
      if (i + kLanes <= n) {
        Floats a, b;
        decode_two<E>(load_half(codes + i), a, b);
        store(out + i, Vec<T>(a * units));
        i += kLanes;
      }
    }
#endif
    for (; i < n; ++i) from_float(encoding::decode<E>(codes[i]) * scale, out[i]);
  }
}

// The same, of codes with a scale each. `fits`: none of these is near the largest float.
template <class E, class T>
TRANSFORMER_OPS_INLINE void decode_bytes(const uint8_t* codes, T* out, int64_t n,
                                         const float* scales, [[maybe_unused]] bool fits,
                                         [[maybe_unused]] bool stream) {
  int64_t i = 0;
  if constexpr (__is_same(T, double)) {
    for (; i < n; ++i) {
      out[i] = static_cast<double>(encoding::decode<E>(codes[i])) * static_cast<double>(scales[i]);
    }
  } else {
#if defined(__AVX2__)
    constexpr int64_t kLanes = Vec<T>::kLanes;
    const auto unit = [&](int64_t j) { return load(scales + j).native * kDecodedUnit<E>; };
    for (; fits && i + 2 * kLanes <= n; i += 2 * kLanes) {
      Floats a, b;
      decode_two<E>(load_bytes(codes + i), a, b);
      store_two(out + i, Vec<T>(a * unit(i)), Vec<T>(b * unit(i + kLanes)), stream);
    }
#endif
    for (; i < n; ++i) from_float(encoding::decode<E>(codes[i]) * scales[i], out[i]);
  }
}

// Whether scales may be multiplied by what decode_two() leaves out.
template <class E>
TRANSFORMER_OPS_INLINE bool decodes_by_vectors([[maybe_unused]] float scale) {
#if defined(__AVX2__)
  return !(scale * kDecodedUnit<E> > encoding::kMost);
#else
  return true;
#endif
}

}  // namespace
}  // namespace transformer_ops::cpu
