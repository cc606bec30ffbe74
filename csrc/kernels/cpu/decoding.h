// Vector conversion of codes to numbers, bitwise as the formulas of kernels/encoding.h.
#pragma once

#include "kernels/encoding.h"
#include "lanes.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

namespace encoding = transformer_ops::encoding;

// decode_two() returns the values of codes divided by this number.
template <class E>
constexpr float kDecodedUnit = 1.0f;

#if defined(__AVX2__) || defined(__aarch64__)
// E4M3 is decoded through float16, whose subnormal numbers cost nothing; E4M3's are among them.
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
#elif defined(__AVX2__)
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
#else
using CodeBytes = uint8x8_t;
using CodeWords = uint16x8_t;
TRANSFORMER_OPS_INLINE CodeBytes load_bytes(const uint8_t* p) { return vld1_u8(p); }
TRANSFORMER_OPS_INLINE CodeBytes load_half(const uint8_t* p) {
  return vcreate_u8(load_unaligned<uint32_t>(p));
}
TRANSFORMER_OPS_INLINE CodeWords widen(CodeBytes x) { return (CodeWords)vmovl_s8((int8x8_t)x); }
TRANSFORMER_OPS_INLINE void halves_to_floats(CodeWords x, Floats& a, Floats& b) {
  a = (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x)));
  b = (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)));
}
TRANSFORMER_OPS_INLINE void ints_to_floats(CodeBytes x, Floats& a, Floats& b) {
  const auto words = (int16x8_t)widen(x);
  a = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
  b = (Floats)vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)));
}
TRANSFORMER_OPS_INLINE CodeBytes look_up(const uint8_t* table, CodeBytes x) {
  return vqtbl1_u8(vld1q_u8(table), x);
}
#endif

struct NormalFloats {
  alignas(64) float numbers[16];
  constexpr NormalFloats() {
    for (uint32_t i = 0; i < 16; ++i) numbers[i] = encoding::nf4_number(i);
  }
};
inline constexpr NormalFloats kNormalFloats;
#if defined(__AVX2__)
TRANSFORMER_OPS_INLINE Floats look_up_normal(__m128i codes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, codes),
                                             _mm512_load_ps(kNormalFloats.numbers));
#else
  const __m256i index = _mm256_cvtepu8_epi32(codes);
  const auto half = [&](int i) {
    return _mm256_permutevar8x32_ps(_mm256_load_ps(kNormalFloats.numbers + i), index);
  };
  const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return (Floats)_mm256_blendv_ps(half(0), half(8), is_upper);
#endif
}
#else
TRANSFORMER_OPS_INLINE Floats look_up_normal(uint16x4_t codes) {
  // Four bytes of each number.
  const auto table = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(kNormalFloats.numbers));
  const uint32x4_t first = vmovl_u16(codes) * 0x04040404u + 0x03020100u;
  return (Floats)vqtbl4q_u8(table, (uint8x16_t)first);
}
#endif

// The upper bytes of the sixteen E2M1 numbers in float16.
alignas(16) constexpr uint8_t kUpperBytes[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                                 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};

template <class E>
TRANSFORMER_OPS_INLINE void decode_two(CodeBytes bytes, Floats& a, Floats& b) {
  typedef int16_t Words __attribute__((vector_size(sizeof(CodeWords))));
  if constexpr (E::kInteger) {
    ints_to_floats(bytes, a, b);
  } else if constexpr (!E::kFloat) {
#if defined(__AVX512F__)
    a = look_up_normal(_mm256_castsi256_si128(bytes));
    b = look_up_normal(_mm256_extracti128_si256(bytes, 1));
#elif defined(__aarch64__)
    const CodeWords words = vmovl_u8(bytes);
    a = look_up_normal(vget_low_u16(words));
    b = look_up_normal(vget_high_u16(words));
#else
    a = look_up_normal(bytes);
    b = look_up_normal(_mm_srli_si128(bytes, 8));
#endif
  } else if constexpr (E::kMantissa == 3) {
    // float16 has one more exponent bit, and three bits more mantissa. NaN is handled separately:
    // only NaN carries into the highest bit of the exponent.
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

// Multiplies codes by a power of two to bfloat16 numbers without a product: only the exponent
// changes.
template <class E>
class ShiftedCodes {
  typedef int16_t Words __attribute__((vector_size(64)));
  static constexpr int kFew = 1 << E::kMantissa, kDropped = 7 - E::kMantissa;

  // Indexed by the lowest five bits of a code: its number if it is subnormal, infinite or NaN.
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
  // Is the scale such a power, and does no number become subnormal or infinite?
  static TRANSFORMER_OPS_INLINE bool fits(float scale) {
    constexpr uint32_t kLargest = E::kFirstNan - E::kInfinities - 1;
    constexpr int kMost = static_cast<int>(kLargest >> E::kMantissa) - 1 + E::kLeast;
    constexpr int kFirst = -126 - (E::kLeast - E::kMantissa), kLast = 127 - kMost;
    // The exponent of a negative scale is above them all.
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

  // Returns the numbers of 32 codes.
  TRANSFORMER_OPS_INLINE __m512i operator()(__m256i codes) const {
    constexpr int16_t kNormal = E::kFirstNan - E::kInfinities - kFew;
    const __m512i wide = _mm512_maskz_cvtepi8_epi16(0xffffffff, codes);
    const Words above = ((Words)wide & 0x7f) - static_cast<int16_t>(kFew);
    const auto other = _mm512_cmpge_epu16_mask((__m512i)above, _mm512_set1_epi16(kNormal));
    const __m512i normal = (__m512i)((above << kDropped) + first_);
    const auto magnitude = (Words)_mm512_mask_permutexvar_epi16(normal, other, wide, others_);
    return (__m512i)(magnitude | ((Words)wide & static_cast<int16_t>(0x8000)));
  }

  // Decodes whole vectors; returns the number of codes decoded.
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

// Converts one-byte codes to code * scale.
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
#if defined(__AVX2__) || defined(__aarch64__)
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

// The same for codes that each have a scale. `fits`: no scale is near the largest float.
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
#if defined(__AVX2__) || defined(__aarch64__)
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

// Can scales be multiplied by the factor that decode_two() omits?
template <class E>
TRANSFORMER_OPS_INLINE bool decodes_by_vectors([[maybe_unused]] float scale) {
#if defined(__AVX2__) || defined(__aarch64__)
  return !(scale * kDecodedUnit<E> > encoding::kMost);
#else
  return true;
#endif
}

}  // namespace
}  // namespace transformer_ops::cpu
