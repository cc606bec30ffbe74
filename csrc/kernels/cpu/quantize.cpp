// Conversion of rows to codes and block scales, and back.
#include "kernels/quantize.h"

#include "decoding.h"
#include "elements.h"
#include "four_over_six.h"
#include "numbers.h"
#include "rows.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

using encoding::BlockScale;
using kernel::ScaleRule;

// The larger of two magnitudes; NaN if one is NaN.
TRANSFORMER_OPS_INLINE float larger_magnitude(float a, float b) {
  return float_bits(a) > float_bits(b) ? a : b;
}

// ---- 4-bit codes

template <class E>
constexpr bool kPacked = E::kBits == 4;

// Conversion of two codes to a byte, and back.
template <class E>
TRANSFORMER_OPS_INLINE void pack(const uint8_t* codes, uint8_t* packed, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) {
    packed[i] = static_cast<uint8_t>(encoding::pair_of<E>(codes[2 * i], codes[2 * i + 1]));
  }
  if (n % 2 != 0) packed[n / 2] = static_cast<uint8_t>(encoding::pair_of<E>(codes[n - 1], 0));
}
template <class E>
TRANSFORMER_OPS_INLINE void unpack(const uint8_t* packed, uint8_t* codes, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = static_cast<uint8_t>(encoding::code_in<E>(packed[i], false));
    codes[2 * i + 1] = static_cast<uint8_t>(encoding::code_in<E>(packed[i], true));
  }
  if (n % 2 != 0) codes[n - 1] = static_cast<uint8_t>(encoding::code_in<E>(packed[n / 2], false));
}

// ---- encode

template <class E, class N>
TRANSFORMER_OPS_INLINE void encode_block(ScaleRule rule, const N* x, uint8_t* codes, int64_t n,
                                         float amax, float scale) {
  const bool fits = !E::kFloat || rule == ScaleRule::PowerOfTwo || rule == ScaleRule::E8M0;
  if (fits && encoding::is_finite(amax)) {
    encode_bytes<E, Known::Fits>(x, codes, n, scale);
  } else {
    encode_bytes<E, Known::Nothing>(x, codes, n, scale);
  }
}

// Encodes blocks of one row.
template <class E, class N>
void encode_row(const kernel::Format& format, const N* x, float tensor_scale, uint8_t* codes,
                void* scales, int64_t first_scale, int64_t h) {
  const ScaleRule rule = encoding::rule_for<E>(format);
  const int64_t columns = format.block_columns;
  for (int64_t i = 0, block = first_scale; i < h; i += columns, ++block) {
    const int64_t n = smaller(columns, h - i);
    const float amax = largest_of(x + i, n);
    const BlockScale scale = encoding::block_scale<E>(rule, amax, tensor_scale);
    encoding::store_scale(rule, scales, block, scale);
    encode_block<E>(rule, x + i, codes + i, n, amax, scale.encode);
  }
}

// The largest magnitudes of the blocks of a few rows.
template <class N>
void largest_of_blocks(const N* x, float* amax, int64_t rows, int64_t h, int64_t columns) {
  for (int64_t block = 0; block * columns < h; ++block) amax[block] = 0.0f;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0, block = 0; i < h; i += columns, ++block) {
      const float found = largest_of(x + row * h + i, smaller(columns, h - i));
      amax[block] = larger_magnitude(amax[block], found);
    }
  }
}

// Encodes a row of blocks whose scales are known.
template <class E, class N>
void encode_row_of_blocks(const kernel::Format& format, const N* x, const float* amax,
                          const float* scales, uint8_t* codes, int64_t h) {
  const ScaleRule rule = encoding::rule_for<E>(format);
  const int64_t columns = format.block_columns;
  for (int64_t i = 0, block = 0; i < h; i += columns, ++block) {
    const int64_t n = smaller(columns, h - i);
    encode_block<E>(rule, x + i, codes + i, n, amax[block], scales[block]);
  }
}

// A row of codes, which are written to `to` when they are complete.
template <class E>
class CodeRow {
 public:
  explicit CodeRow(int64_t h) : h_(h), bytes_(kPacked<E> ? h : 0) {}
  uint8_t* begin(uint8_t* to) { return kPacked<E> ? bytes_.data() : to; }
  void end(uint8_t* to) {
    if constexpr (kPacked<E>) pack<E>(bytes_.data(), to, h_);
  }
  int64_t bytes() const { return kPacked<E> ? (h_ + 1) / 2 : h_; }

 private:
  int64_t h_;
  Scratch<uint8_t> bytes_;
};

// Does the element type have formats with blocks of one column?
template <class E>
constexpr bool kHasColumns = E::kFloat;

// The scales of a strip (the rows of one row of blocks), from the blocks' largest magnitudes.
template <class E, class N>
class ScalesOfStrip {
 public:
  ScalesOfStrip(const kernel::Format& format, const TensorScale& tensor, void* scales, int64_t h)
      : format_(format),
        tensor_scale_(tensor.encode),
        scales_(scales),
        h_(h),
        blocks_((h + format.block_columns - 1) / format.block_columns),
        encode_(blocks_),
        choices_(format, tensor, h) {}

  void set(const N* x, int64_t strip, int64_t rows, const float* amax) {
    const int64_t first = strip * blocks_;
    if constexpr (kPacked<E>) {
      if (format_.chooses_scale()) return choose(x, first, rows, amax);
    }
    const ScaleRule rule = encoding::rule_for<E>(format_);
    for (int64_t block = 0; block < blocks_; ++block) {
      const BlockScale found = encoding::block_scale<E>(rule, amax[block], tensor_scale_);
      encoding::store_scale(rule, scales_, first + block, found);
      encode_.data()[block] = found.encode;
    }
  }
  // The scale that encodes each block.
  const float* encode() { return encode_.data(); }

 private:
  void choose(const N* x, int64_t first, int64_t rows, const float* amax) {
    choices_.choose(x, rows, amax);
    const float *const encode = choices_.encode(), *const number = choices_.number();
    for (int64_t block = 0; block < blocks_; ++block) {
      const uint32_t byte = encoding::encode<encoding::E4M3>(number[block], 1.0f);
      static_cast<uint8_t*>(scales_)[first + block] = static_cast<uint8_t>(byte);
      encode_.data()[block] = encode[block];
    }
  }

  const kernel::Format& format_;
  float tensor_scale_;
  void* scales_;
  int64_t h_, blocks_;
  Scratch<float> encode_;
  ScaleChoices<N> choices_;
};

// Encodes blocks of one column.
template <class E, class Source>
void quantize_columns(const kernel::Format& format, const Source& x, const TensorScale& tensor,
                      uint8_t* codes, void* scales, int64_t rows, int64_t h) {
  CodeRow<E> row_of(h);
  Scratch<float> amax(h);
  Reader<Source> read(x, smaller(format.block_rows, rows) * h);
  ScalesOfStrip<E, typename Source::Number> strip(format, tensor, scales, h);
  for (int64_t first = 0, number = 0; first < rows; first += format.block_rows, ++number) {
    const int64_t count = smaller(format.block_rows, rows - first);
    const auto* const numbers = read(first * h, count * h);
    for (int64_t j = 0; j < h; ++j) amax.data()[j] = 0.0f;
    for (int64_t row = 0; row < count; ++row) keep_larger(numbers + row * h, amax.data(), h);
    strip.set(numbers, number, count, amax.data());
    for (int64_t row = 0; row < count; ++row) {
      uint8_t* const to = codes + (first + row) * row_of.bytes();
      encode_bytes<E>(numbers + row * h, row_of.begin(to), h, strip.encode());
      row_of.end(to);
    }
  }
}

template <class E, class Source>
void quantize_blocks(const kernel::Format& format, const Source& x, const TensorScale& tensor,
                     uint8_t* codes, void* scales, int64_t rows, int64_t h) {
  if constexpr (kHasColumns<E>) {
    if (format.block_columns == 1) {
      return quantize_columns<E>(format, x, tensor, codes, scales, rows, h);
    }
  }
  const int64_t columns = format.block_columns, blocks = (h + columns - 1) / columns;
  CodeRow<E> row_of(h);
  Reader<Source> read(x, smaller(format.block_rows, rows) * h);
  if (format.block_rows == 1 && !format.chooses_scale()) {
    for (int64_t row = 0; row < rows; ++row) {
      uint8_t* to = codes + row * row_of.bytes();
      encode_row<E>(format, read(row * h, h), tensor.encode, row_of.begin(to), scales, row * blocks,
                    h);
      row_of.end(to);
    }
    return;
  }
  Scratch<float> amax(blocks);
  ScalesOfStrip<E, typename Source::Number> strip(format, tensor, scales, h);
  for (int64_t first = 0, number = 0; first < rows; first += format.block_rows, ++number) {
    const int64_t count = smaller(format.block_rows, rows - first);
    const auto* const numbers = read(first * h, count * h);
    largest_of_blocks(numbers, amax.data(), count, h, columns);
    strip.set(numbers, number, count, amax.data());
    for (int64_t row = 0; row < count; ++row) {
      uint8_t* to = codes + (first + row) * row_of.bytes();
      encode_row_of_blocks<E>(format, numbers + row * h, amax.data(), strip.encode(),
                              row_of.begin(to), h);
      row_of.end(to);
    }
  }
}

// ---- decode

// Unpacks a row of codes to bytes.
template <class E>
const uint8_t* unpacked(CodeRow<E>& row, const uint8_t* from, [[maybe_unused]] int64_t h) {
  if constexpr (kPacked<E>) {
    unpack<E>(from, row.begin(nullptr), h);
    return row.begin(nullptr);
  } else {
    return from;
  }
}

// Converts n scales to floats.
void decode_scales(ScaleRule rule, const void* scales, int64_t first, int64_t n, float tensor_scale,
                   float* out) {
  if (rule == ScaleRule::E4M3) {
    const uint8_t* const codes = as<uint8_t>(scales) + first;
    return decode_bytes<encoding::E4M3>(codes, out, n, tensor_scale, /*stream=*/false);
  }
  for (int64_t i = 0; i < n; ++i) {
    out[i] = encoding::decoding_scale(rule, scales, first + i, tensor_scale);
  }
}

// The scales of a row of blocks. Those of 4-bit codes, which are many, are decoded together.
template <class E>
class RowOfScales {
 public:
  RowOfScales(const kernel::Format& format, const void* scales, float tensor_scale, int64_t blocks)
      : rule_(encoding::rule_for<E>(format)),
        scales_(scales),
        tensor_scale_(tensor_scale),
        per_tensor_(format.per_tensor()),
        blocks_(blocks),
        decoded_(kPacked<E> ? blocks : 0) {}

  void start(int64_t row) {
    first_ = row * blocks_;
    if constexpr (kPacked<E>) {
      decode_scales(rule_, scales_, first_, blocks_, tensor_scale_, decoded_.data());
    }
  }
  float operator[](int64_t block) {
    if constexpr (kPacked<E>) return decoded_.data()[block];
    if (per_tensor_) return tensor_scale_;
    return encoding::decoding_scale(rule_, scales_, first_ + block, tensor_scale_);
  }

 private:
  ScaleRule rule_;
  const void* scales_;
  float tensor_scale_;
  bool per_tensor_;
  int64_t blocks_, first_ = 0;
  Scratch<float> decoded_;
};

// Decodes blocks of one column.
template <class E, class T>
void dequantize_columns(const kernel::Format& format, const uint8_t* codes, const void* scales,
                        float decoded_tensor_scale, T* out, int64_t rows, int64_t h) {
  const ScaleRule rule = encoding::rule_for<E>(format);
  CodeRow<E> row_of(h);
  Scratch<float> scale(h);
  with_streaming(out, rows, h, [&, rule](bool stream) {
    bool fits = true;
    for (int64_t row = 0; row < rows; ++row) {
      if (row % format.block_rows == 0) {
        const int64_t first = row / format.block_rows * h;
        decode_scales(rule, scales, first, h, decoded_tensor_scale, scale.data());
        fits = true;
        for (int64_t j = 0; j < h; ++j) fits &= decodes_by_vectors<E>(scale.data()[j]);
      }
      decode_bytes<E>(unpacked(row_of, codes + row * row_of.bytes(), h), out + row * h, h,
                      scale.data(), fits, stream);
    }
  });
}

template <class E, class T>
void dequantize_rows(const kernel::Format& format, const uint8_t* codes, const void* scales,
                     float decoded_tensor_scale, T* out, int64_t rows, int64_t h) {
  if constexpr (kHasColumns<E>) {
    if (format.block_columns == 1) {
      return dequantize_columns<E>(format, codes, scales, decoded_tensor_scale, out, rows, h);
    }
  }
  const int64_t columns = format.per_tensor() ? h : format.block_columns;
  const int64_t blocks = (h + columns - 1) / columns;
  CodeRow<E> row_of(h);
  RowOfScales<E> scale(format, scales, decoded_tensor_scale, blocks);
  with_streaming(out, rows, h, [&](bool stream) {
    // Streaming requires that a block's numbers are whole vectors.
    const bool streams = stream && columns * static_cast<int64_t>(sizeof(T)) % kVectorBytes == 0;
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* const from = unpacked(row_of, codes + row * row_of.bytes(), h);
      if (format.per_tensor() || row % format.block_rows == 0) {
        scale.start(format.per_tensor() ? 0 : row / format.block_rows);
      }
      for (int64_t i = 0, block = 0; i < h; i += columns, ++block) {
        decode_bytes<E>(from + i, out + row * h + i, smaller(columns, h - i), scale[block],
                        streams);
      }
    }
  });
}

namespace entry {

float largest(DType dtype, const void* x, int64_t n) {
  float best = 0.0f;
  with_numbers(dtype, x, [&](const auto& source) {
    for_pieces(source, n, [&](const auto* numbers, int64_t, int64_t count) {
      best = larger_magnitude(best, largest_of(numbers, count));
    });
  });
  return best;
}

void quantize(const kernel::Format& format, DType dtype, const void* x, const TensorScale& tensor,
              void* codes, void* scales, int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  with_numbers(dtype, x, [&](const auto& source) {
    with_element(format.element, [&]<class E>(Tag<E>) {
      if (format.per_tensor()) {
        for_pieces(source, rows * h, [&](const auto* numbers, int64_t first, int64_t n) {
          encode_bytes<E, Known::Nothing>(numbers, as<uint8_t>(codes) + first, n, tensor.encode);
        });
      } else {
        quantize_blocks<E>(format, source, tensor, as<uint8_t>(codes), scales, rows, h);
      }
    });
  });
}

void dequantize(const kernel::Format& format, DType dtype, const void* codes, const void* scales,
                float decoded_tensor_scale, void* out, int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_element(format.element, [&]<class E>(Tag<E>) {
      dequantize_rows<E>(format, as<uint8_t>(codes), scales, decoded_tensor_scale, as<T>(out), rows,
                         h);
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(largest, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(quantize, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(dequantize, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
