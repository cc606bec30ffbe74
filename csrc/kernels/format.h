// The formats of quantized tensors, one row each; encoding.h defines the values of their codes.
//
// A quantized tensor is codes and scales: a number is its code's value times the scale of its
// block. Blocks tile the tensor's rows (its leading dimensions) and columns (its last dimension).
// Blocks at the ends may be smaller.
//
// Everything has internal linkage, for the reason given in math.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace transformer_ops::kernel {

// The type of a code.
enum class Element : uint8_t { E4M3, E5M2, E2M1, NF4, Int8 };

// Does a code have a sign, an exponent and a mantissa?
constexpr bool is_floating(Element element) {
  return element != Element::NF4 && element != Element::Int8;
}

// The type of a scale, and how it follows from the largest magnitude of its block.
enum class ScaleRule : uint8_t {
  Float32,     // largest code / largest magnitude encodes
  PowerOfTwo,  // the same, rounded down to a power of two, stored as float32
  E8M0,        // a byte, the exponent of a power of two that is rounded up
  E4M3,        // a byte, an E4M3 number, times one float32 of the whole tensor
};

// "4 over 6": the largest number of a block becomes 6 (the largest code) or 4, whichever has the
// smaller sum of absolute, or squared, rounding errors. Off: it always becomes the largest code.
enum class FourOverSix : uint8_t { Off, Absolute, Squared };

struct Format {
  const char* name;  // used in plans, schemas and reports
  Element element;
  ScaleRule rule;
  int bits;                           // of a code; two of 4 bits are a byte (encoding::pair_of())
  float largest;                      // the largest value of a code
  int64_t block_rows, block_columns;  // 0: the tensor is one block
  FourOverSix four_over_six = FourOverSix::Off;
  // If block scales are relative to a scale of the tensor: the block scale of the tensor's largest
  // number.
  float largest_scale = 448.0f;

  constexpr bool per_tensor() const { return block_columns == 0; }
  // Is there a scale of the tensor besides those of blocks?
  constexpr bool has_tensor_scale() const { return rule == ScaleRule::E4M3; }
  // Is the scale of each block a power of two?
  constexpr bool has_block_powers() const {
    return !per_tensor() && (rule == ScaleRule::PowerOfTwo || rule == ScaleRule::E8M0);
  }
  // Does the scale of a block depend on more than its largest number?
  constexpr bool chooses_scale() const { return four_over_six != FourOverSix::Off; }
  // Do two formats differ only in their blocks?
  constexpr bool is_like(const Format& other) const {
    return element == other.element && rule == other.rule && four_over_six == other.four_over_six &&
           largest_scale == other.largest_scale;
  }
};

// What a kernel needs to know about the whole tensor.
struct TensorScale {
  float encode = 1.0f;  // encoding::tensor_scale()
  float decode = 1.0f;  // the factor of decoded numbers, usually the inverse
  float amax = 0.0f;    // the largest magnitude, read if formats choose scales
};

namespace {

// A largest scale of 256 leaves room for scales that are stretched by 1.5; scales above 448 are
// clipped.
constexpr Format four_over_six(const char* name, FourOverSix errors, float largest_scale,
                               int64_t block_rows, int64_t block_columns) {
  return {name,          Element::E2M1, ScaleRule::E4M3, 4, 6.0f, block_rows,
          block_columns, errors,        largest_scale};
}

inline constexpr Format kFormats[] = {
    {"e4m3", Element::E4M3, ScaleRule::Float32, 8, 448.0f, 0, 0},
    {"e5m2", Element::E5M2, ScaleRule::Float32, 8, 57344.0f, 0, 0},
    {"e4m3 pow2", Element::E4M3, ScaleRule::PowerOfTwo, 8, 448.0f, 0, 0},
    {"e5m2 pow2", Element::E5M2, ScaleRule::PowerOfTwo, 8, 57344.0f, 0, 0},
    {"e4m3 1x128", Element::E4M3, ScaleRule::PowerOfTwo, 8, 448.0f, 1, 128},
    {"e5m2 1x128", Element::E5M2, ScaleRule::PowerOfTwo, 8, 57344.0f, 1, 128},
    {"e4m3 128x1", Element::E4M3, ScaleRule::PowerOfTwo, 8, 448.0f, 128, 1},
    {"e5m2 128x1", Element::E5M2, ScaleRule::PowerOfTwo, 8, 57344.0f, 128, 1},
    {"e4m3 128x128", Element::E4M3, ScaleRule::PowerOfTwo, 8, 448.0f, 128, 128},
    {"e5m2 128x128", Element::E5M2, ScaleRule::PowerOfTwo, 8, 57344.0f, 128, 128},
    {"mx e4m3", Element::E4M3, ScaleRule::E8M0, 8, 448.0f, 1, 32},
    {"mx e5m2", Element::E5M2, ScaleRule::E8M0, 8, 57344.0f, 1, 32},
    {"mx e4m3 32x1", Element::E4M3, ScaleRule::E8M0, 8, 448.0f, 32, 1},
    {"mx e5m2 32x1", Element::E5M2, ScaleRule::E8M0, 8, 57344.0f, 32, 1},
    {"nvfp4", Element::E2M1, ScaleRule::E4M3, 4, 6.0f, 1, 16},
    {"nvfp4 16x1", Element::E2M1, ScaleRule::E4M3, 4, 6.0f, 16, 1},
    {"nvfp4 16x16", Element::E2M1, ScaleRule::E4M3, 4, 6.0f, 16, 16},
    four_over_six("nvfp4 4over6", FourOverSix::Absolute, 256.0f, 1, 16),
    four_over_six("nvfp4 4over6 16x1", FourOverSix::Absolute, 256.0f, 16, 1),
    four_over_six("nvfp4 4over6 16x16", FourOverSix::Absolute, 256.0f, 16, 16),
    four_over_six("nvfp4 4over6 448", FourOverSix::Absolute, 448.0f, 1, 16),
    four_over_six("nvfp4 4over6 448 16x1", FourOverSix::Absolute, 448.0f, 16, 1),
    four_over_six("nvfp4 4over6 448 16x16", FourOverSix::Absolute, 448.0f, 16, 16),
    four_over_six("nvfp4 4over6 mse", FourOverSix::Squared, 256.0f, 1, 16),
    four_over_six("nvfp4 4over6 mse 16x1", FourOverSix::Squared, 256.0f, 16, 1),
    four_over_six("nvfp4 4over6 mse 16x16", FourOverSix::Squared, 256.0f, 16, 16),
    four_over_six("nvfp4 4over6 mse 448", FourOverSix::Squared, 448.0f, 1, 16),
    four_over_six("nvfp4 4over6 mse 448 16x1", FourOverSix::Squared, 448.0f, 16, 1),
    four_over_six("nvfp4 4over6 mse 448 16x16", FourOverSix::Squared, 448.0f, 16, 16),
    {"nf4", Element::NF4, ScaleRule::Float32, 4, 1.0f, 1, 64},
    {"int8 1x32", Element::Int8, ScaleRule::Float32, 8, 127.0f, 1, 32},
    {"int8 1x128", Element::Int8, ScaleRule::Float32, 8, 127.0f, 1, 128},
};

// Null if there is no format of that name.
[[maybe_unused]] constexpr const Format* find_format(std::string_view name) {
  for (const Format& format : kFormats) {
    if (name == format.name) return &format;
  }
  return nullptr;
}

}  // namespace
}  // namespace transformer_ops::kernel
