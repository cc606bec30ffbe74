// The scalar formulas of quantized numbers for all devices: a number to its code and back, and the
// scale of a block from its largest magnitude. Rounding is to nearest, ties to even. Numbers that
// are too large, and infinity, become the largest number of the format; NaN stays NaN.
//
// Everything has internal linkage, for the reason given in math.h.
#pragma once

#include <cstring>

#include "kernels/format.h"
#include "kernels/math.h"

namespace transformer_ops::encoding {
namespace {

using kernel::Element;
using kernel::ScaleRule;

TRANSFORMER_OPS_MATH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
TRANSFORMER_OPS_MATH float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
constexpr float kMost = 0x1.fffffep127f;  // the largest float

TRANSFORMER_OPS_MATH bool is_finite(float x) { return (bits_of(x) & kMagnitude) < kInfinity; }

// A product that no compiler fuses with a sum.
TRANSFORMER_OPS_MATH float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// ---- the elements

// A sign, an exponent and kMantissa bits; kLeast is the exponent of the least normal number.
struct E4M3 {
  static constexpr int kMantissa = 3, kLeast = -6;
  static constexpr uint32_t kSign = 0x80, kNanCode = 0x7f, kFirstNan = 0x7f, kInfinities = 0;
  static constexpr float kLargest = 448.0f;
  static constexpr int kBits = 8;
  static constexpr bool kFloat = true, kInteger = false;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kLeast = -14;
  static constexpr uint32_t kSign = 0x80, kNanCode = 0x7f, kFirstNan = 0x7d, kInfinities = 1;
  static constexpr float kLargest = 57344.0f;
  static constexpr int kBits = 8;
  static constexpr bool kFloat = true, kInteger = false;
};
// It has no NaN; the scale of the block is NaN instead.
struct E2M1 {
  static constexpr int kMantissa = 1, kLeast = 0;
  static constexpr uint32_t kSign = 0x8, kNanCode = 0x7, kFirstNan = 0x8, kInfinities = 0;
  static constexpr float kLargest = 6.0f;
  static constexpr int kBits = 4;
  static constexpr bool kFloat = true, kInteger = false, kHighFirst = false;
};
// Normal float: quantiles of a normal distribution (Dettmers et al. 2023, appendix E). Codes are
// indices of its numbers, in ascending order. It has no NaN. A byte has the first code in its high
// bits, as in bitsandbytes.
struct NF4 {
  static constexpr float kLargest = 1.0f;
  static constexpr int kBits = 4;
  static constexpr bool kFloat = false, kInteger = false, kHighFirst = true;
};
// From -127 to 127. It has no NaN either.
struct Int8 {
  static constexpr float kLargest = 127.0f;
  static constexpr int kBits = 8;
  static constexpr bool kFloat = false, kInteger = true;
};

template <Element element>
struct NumberOf;
template <>
struct NumberOf<Element::E4M3> {
  using type = E4M3;
};
template <>
struct NumberOf<Element::E5M2> {
  using type = E5M2;
};
template <>
struct NumberOf<Element::E2M1> {
  using type = E2M1;
};
template <>
struct NumberOf<Element::NF4> {
  using type = NF4;
};
template <>
struct NumberOf<Element::Int8> {
  using type = Int8;
};

// Adding this to a number of exponent e leaves no bits below the code's last bit, so that the sum
// is rounded there. It is given and returned as bits; e is the exponent of the sum's other part.
template <class E>
constexpr uint32_t kToLastBit = static_cast<uint32_t>(23 - E::kMantissa) << 23;
template <class E>
constexpr uint32_t kLeastExponent = static_cast<uint32_t>(127 + E::kLeast) << 23;

// The code of a scaled number, in the lowest bits; an integer is in two's complement. The code of
// NaN is 0 for integers.
TRANSFORMER_OPS_MATH uint32_t encode_integer(float scaled) {
  if (scaled != scaled) return 0;
  const float above = scaled < -Int8::kLargest ? -Int8::kLargest : scaled;
  const float within = above > Int8::kLargest ? Int8::kLargest : above;
  return bits_of(within + 0x1.8p23f) & 0xff;
}

TRANSFORMER_OPS_MATH constexpr float nf4_number(uint32_t code) {
  constexpr float kNumbers[16] = {
      -1.0f,
      -0.6961928009986877f,
      -0.5250730514526367f,
      -0.39491748809814453f,
      -0.28444138169288635f,
      -0.18477343022823334f,
      -0.09105003625154495f,
      0.0f,
      0.07958029955625534f,
      0.16093020141124725f,
      0.24611230194568634f,
      0.33791524171829224f,
      0.44070982933044434f,
      0.5626170039176941f,
      0.7229568362236023f,
      1.0f,
  };
  return kNumbers[code & 15];
}
// The middle between a number and the next one. Numbers above it have the next code.
TRANSFORMER_OPS_MATH constexpr float nf4_tie(uint32_t code) {
  return (nf4_number(code) + nf4_number(code + 1)) / 2;
}
TRANSFORMER_OPS_MATH uint32_t encode_nf4(float scaled) {
  uint32_t code = 0;
  for (uint32_t i = 0; i < 15; ++i) code += scaled > nf4_tie(i) ? 1u : 0u;
  return code;
}

// The code without its sign.
template <class E>
TRANSFORMER_OPS_MATH uint32_t encode_magnitude(float scaled) {
  if (scaled != scaled) return E::kNanCode;
  const float magnitude = scaled > E::kLargest ? E::kLargest : scaled;
  const uint32_t own = bits_of(magnitude) & kInfinity;
  const uint32_t exponent = own > kLeastExponent<E> ? own : kLeastExponent<E>;
  const uint32_t addend = exponent + kToLastBit<E>;
  const uint32_t units = bits_of(magnitude + from_bits(addend)) - addend;
  return units + ((exponent - kLeastExponent<E>) >> (23 - E::kMantissa));
}

// The code of x * scale, for a scale that is not negative.
template <class E>
TRANSFORMER_OPS_MATH uint32_t encode(float x, float scale) {
  if constexpr (E::kInteger) {
    return encode_integer(product(x, scale));
  } else if constexpr (!E::kFloat) {
    return encode_nf4(product(x, scale));
  } else {
    const float magnitude = from_bits(bits_of(x) & kMagnitude);
    const uint32_t sign = (bits_of(x) >> 31) * E::kSign;
    return sign | encode_magnitude<E>(product(magnitude, scale));
  }
}

template <class E>
TRANSFORMER_OPS_MATH float decode_magnitude(uint32_t code) {
  if (code >> E::kMantissa == 0) {
    constexpr float kUnit = 1.0f / static_cast<float>(1 << (E::kMantissa - E::kLeast));
    return static_cast<float>(code) * kUnit;
  }
  if (code >= E::kFirstNan) return from_bits(kNan);
  if (code >= E::kFirstNan - E::kInfinities) return from_bits(kInfinity);
  return from_bits((code << (23 - E::kMantissa)) + kLeastExponent<E> - (1u << 23));
}

// The value of a code.
template <class E>
TRANSFORMER_OPS_MATH float decode(uint32_t code) {
  if constexpr (E::kInteger) {
    return static_cast<float>(static_cast<int8_t>(static_cast<uint8_t>(code)));
  } else if constexpr (!E::kFloat) {
    return nf4_number(code);
  } else {
    const float magnitude = decode_magnitude<E>(code & (E::kSign - 1));
    return from_bits(bits_of(magnitude) | ((code & E::kSign) != 0 ? 0x80000000u : 0u));
  }
}

// Two codes of 4 bits as a byte, and one of them.
template <class E>
TRANSFORMER_OPS_MATH uint32_t pair_of(uint32_t first, uint32_t second) {
  return E::kHighFirst ? second | first << 4 : first | second << 4;
}
template <class E>
TRANSFORMER_OPS_MATH uint32_t code_in(uint32_t byte, bool second) {
  return second != E::kHighFirst ? byte >> 4 : byte & 0xf;
}

// Rounds float64 to a float that has the same code: lost bits set the last bit, so that the code is
// rounded only once if the scale is a power of two.
TRANSFORMER_OPS_MATH float to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  const auto back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const bool away = (x < 0 ? -back : back) > (x < 0 ? -x : x);
  return from_bits((bits_of(nearest) - (away ? 1u : 0u)) | 1u);
}

// ---- scales

// largest / amax; 1 if amax is zero or not finite.
TRANSFORMER_OPS_MATH float encoding_scale(float amax, float largest) {
  if (!(amax > 0) || !is_finite(amax)) return 1.0f;
  const float scale = largest / amax;
  return is_finite(scale) ? scale : kMost;
}

// The same by the rule of a format.
TRANSFORMER_OPS_MATH float encoding_scale(ScaleRule rule, float amax, float largest) {
  const float scale = encoding_scale(amax, largest);
  return rule == ScaleRule::PowerOfTwo ? from_bits(bits_of(scale) & kInfinity) : scale;
}

// The exponent of the least power of two that is at least x >= 0.
TRANSFORMER_OPS_MATH uint32_t encode_e8m0(float x) {
  const uint32_t bits = bits_of(x);
  if (bits > kInfinity) return 255;
  if (bits == kInfinity) return 254;
  if (bits <= 0x00400000u) return 0;  // 2^-127
  const uint32_t exponent = (bits + 0x7fffffu) >> 23;
  return exponent < 254 ? exponent : 254;
}
TRANSFORMER_OPS_MATH float decode_e8m0(uint32_t exponent) {
  if (exponent == 0) return from_bits(0x00400000u);
  return from_bits(exponent == 255 ? kNan : exponent << 23);
}

// The scale that encodes a block, and what is stored to decode it: a float, or a byte. For an E4M3
// byte, `number` is its value.
struct BlockScale {
  float encode;
  float number = 0.0f;
  uint32_t byte = 0;
};

// The scale that stores the E4M3 number nearest to `wanted`.
TRANSFORMER_OPS_MATH BlockScale e4m3_scale(float wanted, float tensor_scale) {
  const uint32_t byte = encode<E4M3>(wanted, 1.0f);
  const float number = decode<E4M3>(byte);
  const float scale = 1.0f / product(number, 1.0f / tensor_scale);
  return {scale > kMost ? kMost : scale, number, byte};
}

// The scale from the largest magnitude of a block, which is NaN if any number is. tensor_scale is
// that of the format: see tensor_scale(). The rule is not a template argument: it costs next to
// nothing once a block, and code that loops over numbers is compiled only for each element type.
template <class E>
TRANSFORMER_OPS_MATH BlockScale block_scale(ScaleRule rule, float amax, float tensor_scale) {
  if (rule == ScaleRule::E8M0) {
    const uint32_t byte = encode_e8m0(product(amax, 1.0f / E::kLargest));
    // A block of nearly zero numbers is encoded unscaled, to zeros.
    const float scale = byte == 255   ? from_bits(kNan)
                        : byte == 254 ? from_bits(0x00400000u)
                        : byte == 0   ? 1.0f
                                      : from_bits((254u - byte) << 23);
    return {scale, 0.0f, byte};
  }
  if (rule == ScaleRule::E4M3) {
    return e4m3_scale(product(amax, product(tensor_scale, 1.0f / 6.0f)), tensor_scale);
  }
  if constexpr (!E::kFloat) {
    // No code is NaN, so the scale is.
    if (amax != amax) return {0.0f, from_bits(kNan)};
    if (amax > kMost) amax = kMost;
  }
  const float scale = encoding_scale(rule, amax, E::kLargest);
  // The inverse of an inverse may differ from amax.
  if constexpr (E::kLargest == 1.0f) return {scale, amax > 0 ? amax : 1.0f};
  return {scale, 1.0f / scale};
}

// The rule of a format with elements E; a compile-time constant if E has only one rule.
template <class E>
TRANSFORMER_OPS_MATH constexpr ScaleRule rule_for(const kernel::Format& format) {
  if constexpr (!E::kFloat) return ScaleRule::Float32;
  if constexpr (E::kBits == 4) return ScaleRule::E4M3;
  return format.rule;
}

// Are the scales of this rule stored as bytes?
TRANSFORMER_OPS_MATH bool has_byte_scales(ScaleRule rule) {
  return rule == ScaleRule::E8M0 || rule == ScaleRule::E4M3;
}

TRANSFORMER_OPS_MATH void store_scale(ScaleRule rule, void* scales, int64_t i,
                                      const BlockScale& scale) {
  if (has_byte_scales(rule)) {
    static_cast<uint8_t*>(scales)[i] = static_cast<uint8_t>(scale.byte);
  } else {
    static_cast<float*>(scales)[i] = scale.number;
  }
}

// The value of a stored scale; decoded_tensor_scale is 1 / tensor_scale().
TRANSFORMER_OPS_MATH float decoding_scale(ScaleRule rule, const void* scales, int64_t i,
                                          float decoded_tensor_scale) {
  if (!has_byte_scales(rule)) return static_cast<const float*>(scales)[i];
  const uint32_t byte = static_cast<const uint8_t*>(scales)[i];
  return rule == ScaleRule::E8M0 ? decode_e8m0(byte)
                                 : product(decode<E4M3>(byte), decoded_tensor_scale);
}

// The scale that encodes a tensor with one block, or that block scales are relative to in formats
// with a scale of the tensor; else 1.
TRANSFORMER_OPS_MATH float tensor_scale(const kernel::Format& format, float amax) {
  if (format.per_tensor()) return encoding_scale(format.rule, amax, format.largest);
  if (format.has_tensor_scale()) return encoding_scale(amax, format.largest_scale * format.largest);
  return 1.0f;
}

TRANSFORMER_OPS_MATH kernel::TensorScale scale_of_tensor(const kernel::Format& format, float amax) {
  const float encode = tensor_scale(format, amax);
  return {encode, 1.0f / encode, amax};
}

// ---- 4 over 6: Cook et al. 2025 (arXiv 2512.02010), in the order of TransformerEngine's float
// operations (common/cast/nvfp4/quantize_4over6_kernel.cuh)

// The scales with which the largest number of a block becomes 6, or 4.
struct ScaleChoice {
  BlockScale six, four;
};

TRANSFORMER_OPS_MATH ScaleChoice scale_choice(float amax, float tensor_scale) {
  const float six = product(amax / E2M1::kLargest, tensor_scale);
  return {e4m3_scale(six, tensor_scale), e4m3_scale(product(six, 1.5f), tensor_scale)};
}

// A square that no compiler fuses with a sum: exact in double, and rounded once.
TRANSFORMER_OPS_MATH float square(float x) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(x, x);
#else
  return static_cast<float>(static_cast<double>(x) * static_cast<double>(x));
#endif
}

// How the rounding errors of a tensor are measured.
struct ErrorRule {
  float amax;  // of the tensor
  float most;  // the number that amax becomes: 6 times the largest scale
  bool squared;
};

TRANSFORMER_OPS_MATH ErrorRule error_rule(const kernel::Format& format, float amax) {
  return {amax, format.largest * format.largest_scale,
          format.four_over_six == kernel::FourOverSix::Squared};
}

// The error of x, whose code has this value, in a block whose scale is this E4M3 number.
TRANSFORMER_OPS_MATH float rounding_error(const ErrorRule& rule, float x, float value,
                                          float number) {
  const float back = product(product(value, number), rule.amax) / rule.most;
  const float error = back - x;
  return rule.squared ? square(error) : math::abs(error);
}

// The errors of a block are summed in the order of its numbers. In a square block, each row is
// summed separately; then row r + 8 is added to row r, then r + 4, r + 2 and r + 1. For ties and
// NaN, six is chosen.
TRANSFORMER_OPS_MATH bool takes_four(float error_of_six, float error_of_four) {
  return error_of_four < error_of_six;
}

}  // namespace
}  // namespace transformer_ops::encoding
