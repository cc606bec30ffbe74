// Quantized tensors by the scalar formulas of csrc/kernels/encoding.h, number by number. The
// kernels of all devices must give the same.
#pragma once

#include "../../../csrc/kernels/encoding.h"
#include "kernel_test.h"

namespace transformer_ops::cpu {

using kernel::Element;
using kernel::ScaleRule;
using kernel::TensorScale;

struct QuantizedShape {
  int64_t rows, h;
};
inline const QuantizedShape kQuantizedShapes[] = {
    {0, 16}, {3, 0}, {1, 1}, {1, 15}, {2, 31}, {5, 100}, {3, 128}, {17, 129}, {2, 513}, {130, 257}};

inline bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}
inline bool same_float(float a, float b) { return same(a, b); }

struct Quantized {
  const kernel::Format* format;
  std::vector<uint8_t> codes, scales;
  float tensor_scale = 1.0f, tensor_amax = 0.0f;
  std::vector<float> encoding_scales;  // of blocks, from quantize_by_formula()

  Quantized(const kernel::Format& f, int64_t rows, int64_t h)
      : format(&f), codes(rows * row_bytes(f, h)), scales(scale_bytes(f, rows, h)) {}

  static int64_t row_bytes(const kernel::Format& f, int64_t h) { return (h * f.bits + 7) / 8; }
  static int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
  static int64_t scale_bytes(const kernel::Format& f, int64_t rows, int64_t h) {
    if (f.per_tensor()) return 0;
    return blocks(rows, f.block_rows) * blocks(h, f.block_columns) *
           (encoding::has_byte_scales(f.rule) ? 1 : 4);
  }

  TensorScale of_tensor() const { return {tensor_scale, 1.0f / tensor_scale, tensor_amax}; }

  // Sets scales that are bytes or floats.
  void set_scales(float scale) {
    for (size_t i = 0; i < scales.size(); ++i) {
      if (encoding::has_byte_scales(format->rule)) {
        scales[i] = static_cast<uint8_t>(encoding::encode_e8m0(scale));
      } else if (i % 4 == 0) {
        std::memcpy(scales.data() + i, &scale, 4);
      }
    }
  }
  void set_scale(int64_t i, const encoding::BlockScale& scale) {
    encoding::store_scale(format->rule, scales.data(), i, scale);
  }
};

// Calls f(Number) with the formulas of a format's elements.
template <class F>
auto with_formulas(const kernel::Format& format, F f) {
  using namespace encoding;
  if (format.element == Element::E4M3) return f(E4M3());
  if (format.element == Element::E5M2) return f(E5M2());
  if (format.element == Element::E2M1) return f(E2M1());
  if (format.element == Element::NF4) return f(NF4());
  return f(Int8());
}

inline float number(const Array& x, int64_t i) { return encoding::to_odd(x[i]); }

inline float larger(float a, float b) {
  return encoding::bits_of(std::abs(b)) > encoding::bits_of(a) ? std::abs(b) : a;
}
inline float largest_by_formula(const Array& x) {
  float best = 0;
  for (int64_t i = 0; i < x.size(); ++i) best = larger(best, number(x, i));
  return best;
}

// A range of rows and columns.
struct Area {
  int64_t top, left, bottom, right;
};

// The sum of a block's errors for a scale. In square blocks the rows are summed first, then their
// halves.
inline float sum_of_errors(const encoding::ErrorRule& rule, bool rows_in_order, const Array& x,
                           int64_t h, const Area& block, const encoding::BlockScale& scale) {
  using namespace encoding;
  std::vector<float> sums(16, 0.0f);
  for (int64_t r = block.top; r < block.bottom; ++r) {
    float& sum = sums[rows_in_order ? 0 : r - block.top];
    for (int64_t c = block.left; c < block.right; ++c) {
      const float number = cpu::number(x, r * h + c);
      sum += rounding_error(rule, number, decode<E2M1>(encode<E2M1>(number, scale.encode)),
                            scale.number);
    }
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t r = 0; r < half; ++r) sums[r] += sums[r + half];
  }
  return sums[0];
}

inline encoding::BlockScale chosen_scale(const kernel::Format& format, const Array& x, int64_t h,
                                         const Area& block, float amax, float tensor_amax) {
  const auto rule = encoding::error_rule(format, tensor_amax);
  const bool is_column = format.block_columns == 1;
  const auto [six, four] =
      encoding::scale_choice(amax, encoding::tensor_scale(format, tensor_amax));
  const bool takes_four = encoding::takes_four(sum_of_errors(rule, is_column, x, h, block, six),
                                               sum_of_errors(rule, is_column, x, h, block, four));
  return takes_four ? four : six;
}

inline Quantized quantize_by_formula(const kernel::Format& format, const Array& x, int64_t rows,
                                     int64_t h) {
  Quantized to(format, rows, h);
  to.tensor_amax = largest_by_formula(x);
  to.tensor_scale = encoding::tensor_scale(format, to.tensor_amax);
  const int64_t height = format.per_tensor() ? std::max<int64_t>(rows, 1) : format.block_rows;
  const int64_t width = format.per_tensor() ? std::max<int64_t>(h, 1) : format.block_columns;
  with_formulas(format, [&]<class E>(E) {
    int64_t block = 0;
    for (int64_t top = 0; top < rows; top += height) {
      for (int64_t left = 0; left < h; left += width, ++block) {
        const int64_t bottom = std::min(top + height, rows), right = std::min(left + width, h);
        float amax = 0;
        for (int64_t r = top; r < bottom; ++r) {
          for (int64_t c = left; c < right; ++c) amax = larger(amax, number(x, r * h + c));
        }
        auto scale = encoding::block_scale<E>(format.rule, amax, to.tensor_scale);
        if (format.chooses_scale()) {
          scale = chosen_scale(format, x, h, {top, left, bottom, right}, amax, to.tensor_amax);
        }
        to.encoding_scales.push_back(scale.encode);
        if (format.per_tensor()) {
          scale.encode = to.tensor_scale;
        } else {
          to.set_scale(block, scale);
        }
        for (int64_t r = top; r < bottom; ++r) {
          for (int64_t c = left; c < right; ++c) {
            const uint32_t code = encoding::encode<E>(number(x, r * h + c), scale.encode);
            uint8_t& byte = to.codes[r * Quantized::row_bytes(format, h) + c * format.bits / 8];
            if constexpr (E::kBits == 4) {
              const uint32_t first = c % 2 == 0 ? code : encoding::code_in<E>(byte, false);
              byte = static_cast<uint8_t>(encoding::pair_of<E>(first, c % 2 == 0 ? 0 : code));
            } else {
              byte = static_cast<uint8_t>(code);
            }
          }
        }
      }
    }
  });
  return to;
}

inline Array dequantize_by_formula(const Quantized& from, DType dtype, int64_t rows, int64_t h) {
  const kernel::Format& format = *from.format;
  Array out(dtype, rows * h);
  const float decoded = 1.0f / from.tensor_scale;
  with_formulas(format, [&]<class E>(E) {
    for (int64_t i = 0; i < rows * h; ++i) {
      const int64_t r = i / h, c = i % h;
      const uint8_t byte = from.codes[r * Quantized::row_bytes(format, h) + c * format.bits / 8];
      uint32_t code = byte;
      if constexpr (E::kBits == 4) code = encoding::code_in<E>(byte, c % 2 != 0);
      float scale = decoded;
      if (!format.per_tensor()) {
        const int64_t block = r / format.block_rows * Quantized::blocks(h, format.block_columns) +
                              c / format.block_columns;
        scale = encoding::decoding_scale(format.rule, from.scales.data(), block, decoded);
      }
      const float value = encoding::decode<E>(code);
      out.set(i, dtype == DType::Float64 ? static_cast<double>(value) * static_cast<double>(scale)
                                         : static_cast<double>(value * scale));
    }
  });
  return out;
}

// Numbers of all sizes, a block of zeros, and some special numbers; the rows of blocks differ.
inline Array hard_numbers(DType dtype, int64_t rows, int64_t h) {
  std::mt19937 generator(17);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-12, 12);
  Array x(dtype, rows * h);
  double scale = 1;
  for (int64_t i = 0; i < rows * h; ++i) {
    if (i % 50 == 0) scale = std::ldexp(1.0, exponent(generator));
    // Every fifth number is next to a tie.
    const double drawn = normal(generator) * scale;
    x.set(i, i % 5 == 0 ? std::round(drawn * 16) / 16 + 0x1p-30 : i / 32 % 7 == 3 ? 0.0 : drawn);
  }
  return x;
}

}  // namespace transformer_ops::cpu
