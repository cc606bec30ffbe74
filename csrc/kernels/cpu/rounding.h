// Rounds numbers to those of a format, with vectors of floats. The results are bitwise those of
// encode and decode in kernels/encoding.h.
//
// A matrix is rounded in strips, which are the rows of one row of blocks: first the blocks' largest
// magnitudes are computed, then their scales, then the numbers.
#pragma once

#include "elements.h"
#include "four_over_six.h"
#include "numbers.h"

namespace transformer_ops::cpu {
namespace {

using kernel::ScaleRule;
using kernel::TensorScale;

// ---- scales

// One scale for all numbers of a run.
struct OneScale {
  float encode, decode;
  TRANSFORMER_OPS_INLINE Floats encoding(int64_t) const { return encode + Floats{}; }
  TRANSFORMER_OPS_INLINE Floats decoding(int64_t) const { return decode + Floats{}; }
};
// A scale for each number. A whole vector can be read at the end of the arrays.
struct ScalesOfColumns {
  const float *encode, *decode;
  TRANSFORMER_OPS_INLINE Floats encoding(int64_t i) const {
    return load_unaligned<Floats>(encode + i);
  }
  TRANSFORMER_OPS_INLINE Floats decoding(int64_t i) const {
    return load_unaligned<Floats>(decode + i);
  }
};

template <class E, ScaleRule rule>
void scales_by_rule(const float* amax, int64_t n, const TensorScale& tensor, float* encode,
                    float* decode) {
  const float encodes = tensor.encode, decodes = tensor.decode;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const encoding::BlockScale scale = encoding::block_scale<E>(rule, amax[i], encodes);
    encode[i] = scale.encode;
    if constexpr (rule == ScaleRule::E8M0) {
      decode[i] = encoding::decode_e8m0(scale.byte);
    } else if constexpr (rule == ScaleRule::E4M3) {
      decode[i] = scale.number * decodes;
    } else {
      decode[i] = scale.number;
    }
  }
}

// The scales that encode and decode blocks with these largest magnitudes.
template <class E>
void scales_of_blocks(const kernel::Format& format, const float* amax, int64_t n,
                      const TensorScale& tensor, float* encode, float* decode) {
  const auto run = [&]<ScaleRule rule>() {
    scales_by_rule<E, rule>(amax, n, tensor, encode, decode);
  };
  if constexpr (!E::kFloat) {
    run.template operator()<ScaleRule::Float32>();
  } else if constexpr (E::kBits == 4) {
    run.template operator()<ScaleRule::E4M3>();
  } else if (format.rule == ScaleRule::E8M0) {
    run.template operator()<ScaleRule::E8M0>();
  } else {
    run.template operator()<ScaleRule::PowerOfTwo>();
  }
}

// ---- numbers of one row

// Stores value * scale, computed in double for doubles.
template <class U>
TRANSFORMER_OPS_INLINE void store_scaled(U* out, Floats value, Floats scale) {
  if constexpr (__is_same(U, double)) {
    const DoublesOfFloats product = __builtin_convertvector(value, DoublesOfFloats) *
                                    __builtin_convertvector(scale, DoublesOfFloats);
    memcpy(out, &product, sizeof(product));
  } else {
    store(out, Vec<U>(value * scale));
  }
}
template <class U>
TRANSFORMER_OPS_INLINE void store_scaled(U* out, Floats value, Floats scale, int64_t count) {
  U lanes[Vec<float>::kLanes];
  store_scaled(lanes, value, scale);
  memcpy(out, lanes, static_cast<size_t>(count) * sizeof(U));
}

// x[0] is column i of the row.
template <class E, Range range, class N, class U, class Scales, class Rounding>
TRANSFORMER_OPS_INLINE void round_run(const N* x, U* out, int64_t i, int64_t n, Scales scales,
                                      const Rounding& rounding) {
  constexpr int64_t kLanes = Vec<N>::kLanes;
  const auto value = [&](int64_t at, auto lanes) __attribute__((always_inline)) {
    return rounding.template round<E, range>(load(x + at, lanes).native, scales.encoding(i + at),
                                             i + at);
  };
  int64_t at = 0;
  if constexpr (sizeof(U) == 2) {
    for (; at + 2 * kLanes <= n; at += 2 * kLanes) {
      const Floats a = value(at, AllLanes()) * scales.decoding(i + at);
      const Floats b = value(at + kLanes, AllLanes()) * scales.decoding(i + at + kLanes);
      store_two(out + at, Vec<U>(a), Vec<U>(b), /*stream=*/false);
    }
  }
  for (; at + kLanes <= n; at += kLanes) {
    store_scaled(out + at, value(at, AllLanes()), scales.decoding(i + at));
  }
  if (at < n) {
    store_scaled(out + at, value(at, FirstLanes{n - at}), scales.decoding(i + at), n - at);
  }
}

// ---- bfloat16 numbers whose scale is a power of two: their 16 bits are rounded directly

typedef uint16_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kWordLanes = kVectorBytes / 2;

// Is a lane all ones? Each lane must be all ones or zero.
[[maybe_unused]] TRANSFORMER_OPS_INLINE bool any(Words mask) {
#if defined(__AVX512F__)
  return _mm512_movepi16_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u16(mask) != 0;
#else
  uint64_t bits = 0;
  for (int64_t i = 0; i < kWordLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

// The bits of the least bfloat16 number whose code is normal. It is above all numbers if it is not
// a normal bfloat16 number.
template <class E>
TRANSFORMER_OPS_INLINE uint16_t least_normal(float encode) {
  const int exponent = static_cast<int>(float_bits(encode) >> 23) - 127;
  const int least = 127 + E::kLeast - exponent;
  return static_cast<uint16_t>(least > 0 ? least << 7 : 0xffff);
}

// Returns false, with nothing done, if a nonzero number is below `least`.
template <class E>
TRANSFORMER_OPS_INLINE bool round_normal(const BFloat16* x, BFloat16* out, Words least) {
  constexpr int kDropped = 7 - E::kMantissa;
  constexpr uint16_t kBelowHalf = (1 << (kDropped - 1)) - 1;
  constexpr auto kKept = static_cast<uint16_t>(~((1 << kDropped) - 1));
  const auto numbers = load_unaligned<Words>(x);
  const Words magnitude = numbers & 0x7fff;
#if defined(__AVX512F__)
  const auto small = _mm512_cmplt_epu16_mask((__m512i)magnitude, (__m512i)least);
  if (_mm512_mask_test_epi16_mask(small, (__m512i)magnitude, (__m512i)magnitude) != 0) return false;
#else
  if (any((Words)(magnitude < least) & (Words)(magnitude != 0))) return false;
#endif
  const Words odd = numbers >> kDropped & 1;
  const Words rounded = (numbers + kBelowHalf + odd) & kKept;
  memcpy(out, &rounded, sizeof(rounded));
  return true;
}

// Processes whole vectors; returns the number of numbers processed. least(i) returns the bounds
// from column i on.
template <class E, class Scales, class Least>
TRANSFORMER_OPS_INLINE int64_t round_words(const BFloat16* x, BFloat16* out, int64_t i, int64_t n,
                                           Scales scales, Least least) {
  int64_t at = 0;
  for (; at + kWordLanes <= n; at += kWordLanes) {
    if (__builtin_expect(round_normal<E>(x + at, out + at, least(i + at)), 1)) continue;
    round_run<E, Range::Fits>(x + at, out + at, i + at, kWordLanes, scales, ToNearest());
  }
  return at;
}

// ---- strips

// Does the element type have formats with one scale, and formats with blocks of one column?
template <class E>
constexpr bool kHasOneScale = E::kFloat&& E::kBits == 8;
template <class E>
constexpr bool kHasBlocksOfAColumn = E::kFloat;
// Does the element type have formats that choose a scale?
template <class E>
constexpr bool kMayChoose = __is_same(E, encoding::E2M1);

// A number that is known at compile time.
template <int64_t value>
struct Fixed {
  constexpr operator int64_t() const { return value; }
};

// The width of the shortest blocks of a row. Since it is known at compile time, no block's end has
// to be computed.
template <class E>
constexpr int64_t kShortBlock = kMayChoose<E>   ? 16
                                : E::kBits == 4 ? 64
                                                : 32;

// Calls f(block, first column, number of columns) for the blocks of a row of h elements.
template <class E, class F>
TRANSFORMER_OPS_INLINE void for_blocks_of_row(int64_t columns, int64_t h, F f) {
  int64_t i = 0, block = 0;
  if (columns == kShortBlock<E>) {
    constexpr Fixed<kShortBlock<E>> kWidth;
    for (; i + kWidth <= h; i += kWidth, ++block) f(block, i, kWidth);
  }
  for (; i < h; i += columns, ++block) f(block, i, smaller(columns, h - i));
}

// The range of finite numbers after scaling.
template <class E>
constexpr Range kFiniteRange = kMayChoose<E> ? Range::Finite : Range::Fits;

template <class E, class N, class U, class Rounding>
class Strips {
 public:
  Strips(const kernel::Format& format, const TensorScale& tensor, int64_t h, Rounding& rounding)
      : format_(format),
        tensor_(tensor),
        h_(h),
        blocks_((h + format.block_columns - 1) / format.block_columns),
        rounding_(rounding),
        // These have room for a whole vector at the end.
        best_(blocks_ + kWordLanes),
        least_(kByWords ? blocks_ + kWordLanes : 0),
        amax_(blocks_),
        encode_(blocks_ + kWordLanes),
        decode_(blocks_ + kWordLanes),
        choices_(format, tensor, h) {}

  // Rounds the rows of one row of blocks; `row` is the number of the first.
  void round(const N* x, U* out, int64_t row, int64_t rows) {
    find_scales(x, rows);
    for (int64_t r = 0; r < rows; ++r) {
      rounding_.start_row(row + r);
      if constexpr (kHasBlocksOfAColumn<E>) {
        if (format_.block_columns == 1) {
          round_columns(x + r * h_, out + r * h_);
          continue;
        }
      }
      round_blocks(x + r * h_, out + r * h_);
    }
  }

 private:
  using Bit = Magnitude<N>;
  // With stochastic rounding, a narrower range saves next to nothing.
  static constexpr Range kFinite = Rounding::kToNearest ? kFiniteRange<E> : Range::Any;
  static constexpr bool kByWords =
      Rounding::kToNearest && kHasOneScale<E> && __is_same(N, BFloat16) && __is_same(U, BFloat16);

  void find_scales(const N* x, int64_t rows) {
    Bit* const best = best_.data();
    memset(best, 0, static_cast<size_t>(blocks_) * sizeof(Bit));
    for (int64_t r = 0; r < rows; ++r) {
      if (format_.block_columns == 1) {
        keep_larger_bits(x + r * h_, best, h_);
        continue;
      }
      const N* const row = x + r * h_;
      for_blocks_of_row<E>(
          format_.block_columns,
          h_, [&](int64_t block, int64_t i, auto n) __attribute__((always_inline)) {
            best[block] = larger(best[block], static_cast<Bit>(largest_magnitude(row + i, n)));
          });
    }
    uint32_t largest = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      amax_.data()[block] = number_of(best[block], N());
      largest = larger(largest, static_cast<uint32_t>(best[block]));
    }
    is_finite_ = encoding::is_finite(number_of(largest, N()));
    if constexpr (kMayChoose<E>) {
      if (format_.chooses_scale()) return choose_scales(x, rows);
    }
    scales_of_blocks<E>(format_, amax_.data(), blocks_, tensor_, encode_.data(), decode_.data());
    if constexpr (kByWords) {
      for (int64_t block = 0; block < blocks_; ++block) {
        least_.data()[block] = least_normal<E>(encode_.data()[block]);
      }
    }
  }

  void choose_scales(const N* x, int64_t rows) {
    choices_.choose(x, rows, amax_.data());
    const float *const encode = choices_.encode(), *const number = choices_.number();
    for (int64_t block = 0; block < blocks_; ++block) {
      encode_.data()[block] = encode[block];
      decode_.data()[block] = number[block] * tensor_.decode;
    }
  }

  void round_blocks(const N* x, U* out) {
    if (is_finite_) {
      round_blocks<kFinite>(x, out);
    } else {
      round_blocks<Range::Any>(x, out);
    }
  }
  template <Range range>
  void round_blocks(const N* x, U* out) {
    for_blocks_of_row<E>(
        format_.block_columns,
        h_, [&](int64_t block, int64_t i, auto n) __attribute__((always_inline)) {
          const OneScale scale{encode_.data()[block], decode_.data()[block]};
          int64_t done = 0;
          if constexpr (kByWords && range != Range::Any) {
            const Words least = least_.data()[block] + Words{};
            done = round_words<E>(
                x + i, out + i, i, n,
                scale, [&](int64_t) __attribute__((always_inline)) { return least; });
          }
          round_run<E, range>(x + i + done, out + i + done, i + done, n - done, scale, rounding_);
        });
  }

  void round_columns(const N* x, U* out) {
    const ScalesOfColumns scales{encode_.data(), decode_.data()};
    if (!is_finite_) {
      round_run<E, Range::Any>(x, out, 0, h_, scales, rounding_);
      return;
    }
    int64_t done = 0;
    if constexpr (kByWords) {
      const auto least = [this](int64_t i) __attribute__((always_inline)) {
        return load_unaligned<Words>(least_.data() + i);
      };
      done = round_words<E>(x, out, 0, h_, scales, least);
    }
    round_run<E, kFinite>(x + done, out + done, done, h_ - done, scales, rounding_);
  }

  const kernel::Format& format_;
  TensorScale tensor_;
  int64_t h_, blocks_;
  Rounding& rounding_;
  Scratch<Bit> best_;
  Scratch<uint16_t> least_;
  Scratch<float> amax_, encode_, decode_;
  ScaleChoices<N> choices_;
  bool is_finite_ = true;
};

// ---- numbers of any dtype

// One scale for all numbers.
template <class E, class Source, class U, class Rounding>
void round_tensor(const Source& x, OneScale scale, U* out, int64_t first_row, int64_t rows,
                  int64_t h, Rounding& rounding) {
  constexpr int64_t kPiece = 4096;  // stays in the first cache
  Reader<Source> read(x, smaller(h, kPiece));
  for (int64_t row = 0; row < rows; ++row) {
    rounding.start_row(first_row + row);
    for (int64_t i = 0; i < h; i += kPiece) {
      const int64_t n = smaller(kPiece, h - i), at = row * h + i;
      round_run<E, Range::Any>(read(at, n), out + at, i, n, scale, rounding);
    }
  }
}

// Rounds in strips of rows; `begin` is the number of the first element.
template <class E, class Source, class U, class Rounding>
void round_strips(const kernel::Format& format, const Source& x, const TensorScale& tensor, U* out,
                  int64_t first_row, int64_t begin, int64_t rows, int64_t h, Rounding& rounding) {
  const int64_t height = format.block_rows;
  Reader<Source> read(x, smaller(height, rows) * h);
  Strips<E, typename Source::Number, U, Rounding> strips(format, tensor, h, rounding);
  for (int64_t row = 0; row < rows; row += height) {
    const int64_t count = smaller(height, rows - row), at = begin + row * h;
    strips.round(read(at, count * h), out + at, first_row + row, count);
  }
}

// The number of rows that can be joined to one, if rows are whole blocks of one row: short rows
// then cost less. Numbers that are rounded at random depend on their row.
template <class Rounding>
int64_t rows_in_one(const kernel::Format& format, int64_t rows, int64_t h) {
  constexpr int64_t kStrip = 4096;  // stays in the first cache from pass to pass
  const bool is_alike =
      Rounding::kToNearest && format.block_rows == 1 && h % format.block_columns == 0;
  return is_alike && 0 < h && h < kStrip ? smaller(rows, kStrip / h) : 1;
}

template <class E, class Source, class U, class Rounding>
void round_rows(const kernel::Format& format, const Source& x, const TensorScale& tensor, U* out,
                int64_t first_row, int64_t rows, int64_t h, Rounding& rounding) {
  if constexpr (kHasOneScale<E>) {
    if (format.per_tensor()) {
      return round_tensor<E>(x, OneScale{tensor.encode, tensor.decode}, out, first_row, rows, h,
                             rounding);
    }
  }
  const auto run = [&](int64_t row, int64_t count, int64_t width) {
    round_strips<E>(format, x, tensor, out, first_row + row, row * h, count, width, rounding);
  };
  const int64_t together = rows_in_one<Rounding>(format, rows, h);
  if (together <= 1) return run(0, rows, h);
  const int64_t whole = rows / together, rest = rows % together;
  run(0, whole, together * h);
  if (rest > 0) run(whole * together, 1, rest * h);
}

// Rounds numbers of one dtype to another. Bfloat16 numbers that stay that are not converted.
template <class E, class Rounding>
void round_rows(const kernel::Format& format, DType from, DType to, const void* x,
                const TensorScale& tensor, void* out, int64_t first_row, int64_t rows, int64_t h,
                Rounding& rounding) {
  with_dtype(to, [&]<class U>(Tag<U>) {
    const auto run = [&](const auto& source) {
      round_rows<E>(format, source, tensor, as<U>(out), first_row, rows, h, rounding);
    };
    if constexpr (__is_same(U, BFloat16)) {
      if (from == to) return run(BFloat16s{as<BFloat16>(x)});
    }
    run(AsFloats{from, x});
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
