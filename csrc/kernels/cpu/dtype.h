// Element types, their conversion to and from the compute type, and the switch from DType to a
// type.
//
// Each file of this folder, except for dispatch.cpp, is compiled once for each instruction set.
// These files and the headers here have internal linkage throughout and use no std templates: the
// linker would merge an inline function that is compiled for several instruction sets, and a
// machine could execute instructions that it does not have.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TRANSFORMER_OPS_INLINE inline __attribute__((always_inline))

namespace transformer_ops::cpu {
namespace {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

template <class T>
constexpr bool kIsAcc = sizeof(T) == sizeof(Acc<T>);

// ---- one element ----

TRANSFORMER_OPS_INLINE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
TRANSFORMER_OPS_INLINE float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

TRANSFORMER_OPS_INLINE float to_float(float x) { return x; }
TRANSFORMER_OPS_INLINE void from_float(float x, float& out) { out = x; }

TRANSFORMER_OPS_INLINE float to_float(BFloat16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

TRANSFORMER_OPS_INLINE void from_float(float x, BFloat16& out) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // rounds to nearest, ties to even
  out.bits = static_cast<uint16_t>((x != x ? bits | 0x400000u : rounded) >> 16);
}

#if defined(__aarch64__)
// Every processor has an instruction for each.
TRANSFORMER_OPS_INLINE float to_float(Half x) { return __builtin_bit_cast(__fp16, x.bits); }
TRANSFORMER_OPS_INLINE void from_float(float x, Half& out) {
  out.bits = __builtin_bit_cast(uint16_t, static_cast<__fp16>(x));
}
#else
// It has no branches, so that loops vectorize if the machine has no instruction for it. Method: F.
// Giesen, "half_to_float_fast" and "float_to_half_fast3_rtne".
TRANSFORMER_OPS_INLINE float to_float(Half x) {
  const uint32_t exponent_mask = 0x7c00u << 13;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & exponent_mask;
  const uint32_t rebiased = magnitude + ((127u - 15u) << 23);
  const uint32_t special = rebiased + ((128u - 16u) << 23);
  const uint32_t subnormal = float_bits(bits_float(rebiased + (1u << 23)) - bits_float(113u << 23));
  const uint32_t finite = exponent == 0 ? subnormal : rebiased;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  return bits_float((exponent == exponent_mask ? special : finite) | sign);
}

TRANSFORMER_OPS_INLINE void from_float(float x, Half& out) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = bits & 0x80000000u;
  const uint32_t magnitude = bits ^ sign;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;  // the adder does the rounding
  const uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(magic)) - magic;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t result = magnitude >= ((127u + 16u) << 23) ? special : finite;
  out.bits = static_cast<uint16_t>(result | (sign >> 16));
}
#endif

// ---- a range ----

// Kernels process blocks of acc values in the first-level cache, so that the arithmetic is compiled
// only once for all element types of a compute type.
constexpr int64_t kBlock = 512;

TRANSFORMER_OPS_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
__attribute__((noinline)) void to_acc(const T* in, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, Half)) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
    }
  }
#endif
#pragma omp simd
  for (int64_t k = i; k < n; ++k) out[k] = to_float(in[k]);
}

template <class T>
__attribute__((noinline)) void from_acc(const float* in, T* out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, Half)) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
    }
  }
#elif defined(__aarch64__)
  // G++ 12 converts one number at a time.
  if constexpr (__is_same(T, Half)) {
    for (; i + 4 <= n; i += 4) {
      vst1_u16(&out[i].bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i))));
    }
  }
#endif
#pragma omp simd
  for (int64_t k = i; k < n; ++k) from_float(in[k], out[k]);
}

// The values of `in` as acc: `in` itself if it has that type, else a copy in the buffer.
template <class T>
TRANSFORMER_OPS_INLINE const Acc<T>* load(const T* in, Acc<T>* buffer, int64_t n) {
  if constexpr (kIsAcc<T>) {
    return in;
  } else {
    to_acc(in, buffer, n);
    return buffer;
  }
}

// ---- DType to type ----

template <class T>
struct Tag {
  using type = T;
};

template <class F>
void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::Float32:
      return f(Tag<float>());
    case DType::Float64:
      return f(Tag<double>());
    case DType::Float16:
      return f(Tag<Half>());
    case DType::BFloat16:
      return f(Tag<BFloat16>());
  }
}

template <class T>
TRANSFORMER_OPS_INLINE const T* as(const void* p) {
  return static_cast<const T*>(p);
}
template <class T>
TRANSFORMER_OPS_INLINE T* as(void* p) {
  return static_cast<T*>(p);
}

}  // namespace
}  // namespace transformer_ops::cpu
