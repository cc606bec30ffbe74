// Rounding to the numbers of a format: to the nearest, bit for bit what codes and back give; at
// random, the two numbers around each.
#include <algorithm>

#include "../../../csrc/kernels/random.h"
#include "kernels/hadamard.h"
#include "kernels/quantize.h"
#include "quantized.h"

namespace transformer_ops::cpu {
namespace {

using namespace encoding;

const DType kDTypes[] = {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16};

class RoundingTest : public KernelTest {
 protected:
  // The bits of n numbers.
  using Bytes = std::vector<char>;
  static int64_t bytes_of(DType dtype) { return cpu::format(dtype).bytes; }

  static uint64_t bits(const Bytes& numbers, DType of, int64_t i) {
    uint64_t found = 0;
    std::memcpy(&found, numbers.data() + i * bytes_of(of), bytes_of(of));
    return found;
  }
  static bool is_nan(uint64_t number, DType of) {
    const uint64_t infinity = of == DType::Float16    ? 0x7c00
                              : of == DType::BFloat16 ? 0x7f80
                              : of == DType::Float32  ? 0x7f800000
                                                      : 0x7ff0000000000000;
    return (number & ((uint64_t{1} << (8 * bytes_of(of) - 1)) - 1)) > infinity;
  }

  Bytes through_codes(const kernel::Format& format, DType to, const void* x,
                      const TensorScale& scale, int64_t rows, int64_t h) {
    Quantized codes(format, rows, h);
    on(quantize)(format, dtype, x, scale, codes.codes.data(), codes.scales.data(), rows, h);
    Bytes out(rows * h * bytes_of(to));
    on(dequantize)(format, to, codes.codes.data(), codes.scales.data(), scale.decode, out.data(),
                   rows, h);
    return out;
  }

  void expect_codes(const kernel::Format& format, DType to, const void* x, int64_t rows,
                    int64_t h) {
    const auto scale = scale_of_tensor(format, on(largest)(dtype, x, rows * h));
    const Bytes want = through_codes(format, to, x, scale, rows, h);
    Bytes got(want.size());
    on(round_to_format)(format, dtype, to, x, scale, got.data(), rows, h);
    if (got == want) return;
    for (int64_t i = 0; i < rows * h; ++i) {
      const uint64_t found = bits(got, to, i), wanted = bits(want, to, i);
      if (found == wanted) continue;
      // Which of two NaN a product is, is the compiler's choice; so is what NaN holds beside its
      // sign, which is that of the number where scales have none.
      const uint64_t sign = uint64_t{1} << (8 * bytes_of(to) - 1);
      const bool both = is_nan(found, to) && is_nan(wanted, to);
      const bool same_sign = (found & sign) == (wanted & sign) || has_byte_scales(format.rule);
      ASSERT_TRUE(both && same_sign)
          << format.name << " to " << static_cast<int>(to) << ", " << rows << " x " << h << " at "
          << i << std::hex << ": " << found << ", want " << wanted;
    }
  }
  void expect_codes(const kernel::Format& format, Array& x, int64_t rows, int64_t h) {
    for (const DType to : kDTypes) expect_codes(format, to, x.data(), rows, h);
  }
};

INSTANTIATE_TEST_SUITE_P(All, RoundingTest, testing::ValuesIn(cases()), case_name);

TEST_P(RoundingTest, EqualsCodesBitForBit) {
  for (const kernel::Format& format : kernel::kFormats) {
    for (const auto& [rows, h] : kQuantizedShapes) {
      Array x = hard_numbers(dtype, rows, h);
      expect_codes(format, x, rows, h);
    }
  }
}

TEST_P(RoundingTest, AdversarialRows) {
  for (const kernel::Format& format : kernel::kFormats) {
    for (const double special :
         {0.0, -0.0, kInf, -kInf, kNan, -kNan, 1e-40, 1e-45, 3.4028234663852886e38, 1e300}) {
      // Others, and one of them.
      for (const double rest : {0.0, 1e-45, 1.0, special}) {
        Array x = rest == 1.0 ? hard_numbers(dtype, 34, 200) : Array(dtype, 34 * 200, rest);
        x.set(7, special);
        x.set(33 * 200 + 100, -special);
        expect_codes(format, x, 34, 200);
      }
    }
  }
}

// Short rows of whole blocks are taken together, more of them than go at a time.
TEST_P(RoundingTest, RowsOfWholeBlocks) {
  for (const auto& [rows, h] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {300, 32}, {37, 128}, {9, 1024}, {2, 4096}}) {
    for (const double special : {1.0, kInf, kNan, 1e-40}) {
      Array x = hard_numbers(dtype, rows, h);
      x.set(h / 2, special);
      x.set(rows * h - 1, -special);
      for (const kernel::Format& format : kernel::kFormats) expect_codes(format, x, rows, h);
    }
  }
}

// Every number of 16 bits that is not above the largest of its block, for blocks of many sizes;
// in each block is a number of that size.
TEST_P(RoundingTest, EveryShortNumberAtManyScales) {
  if (bytes_of(dtype) != 2) GTEST_SKIP() << "16-bit dtypes only";
  constexpr int64_t kRows = 64, kH = 1024;
  const int last = dtype == DType::Float16 ? 0x7c00 : 0x7f80;
  std::vector<uint16_t> x(kRows * kH);
  for (int amax = 1; amax <= last + 1; amax += dtype == DType::Float16 ? 0x123 : 0x3d9) {
    for (int i = 0; i < kRows * kH; ++i) {
      const bool largest = (i / kH + i) % 16 == 0;
      x[i] = static_cast<uint16_t>((i & 0x7fff) <= amax && !largest ? i : amax | (i & 0x8000));
    }
    for (const kernel::Format& format : kernel::kFormats) {
      for (const DType to : {dtype, DType::Float32}) {
        expect_codes(format, to, x.data(), kRows, kH);
      }
    }
  }
}

// The numbers have any exponent, or one of a few exponents below that of the largest.
TEST_P(RoundingTest, RandomBits) {
  if (bytes_of(dtype) == 2) GTEST_SKIP() << "wider dtypes only";
  constexpr int64_t kRows = 35, kH = 1000;
  std::mt19937_64 generator(5);
  for (int round = 0; round < 30; ++round) {
    Bytes x(kRows * kH * bytes_of(dtype));
    for (int64_t i = 0; i < kRows * kH; ++i) {
      const uint64_t drawn = generator();
      if (round % 3 == 0) {
        std::memcpy(x.data() + i * bytes_of(dtype), &drawn, bytes_of(dtype));
        continue;
      }
      // Fewer bits below the sign and the exponent make more ties.
      const int kept = round % 3 == 1 ? 4 : 23;
      const auto exponent = static_cast<int>(drawn % 24) - 10 * (round - 15);
      const double fraction = std::floor(std::ldexp(static_cast<double>(drawn >> 32), kept - 32)) *
                              std::ldexp(1, -kept);
      const double number = std::ldexp(1 + fraction, exponent) * (drawn >> 31 & 1 ? -1 : 1);
      const auto narrow = static_cast<float>(number);
      if (dtype == DType::Float64) {
        std::memcpy(x.data() + i * 8, &number, 8);
      } else {
        std::memcpy(x.data() + i * 4, &narrow, 4);
      }
    }
    for (const kernel::Format& format : kernel::kFormats) {
      for (const DType to : kDTypes) expect_codes(format, to, x.data(), kRows, kH);
    }
  }
}

// ---- at random

// The 16 random bits of column i. A number is rounded up if its bits are among the largest.
uint32_t random_bits(uint64_t seed, int64_t row, int64_t i, int64_t h) {
  const auto counter = static_cast<uint64_t>(row * ((h + 7) / 8) + i / 8);
  const random::Words words = random::philox(seed, counter, 0);
  return words.word[i % 8 / 2] >> (16 * (i % 2)) & 0xffff;
}

// The magnitude that a scaled number becomes, or both that it may where a float cannot tell.
struct Choice {
  double one, other;
};
template <class E>
Choice choose(double scaled, uint32_t bits) {
  double lower = 0, upper = E::kLargest;
  for (uint32_t code = 0; code < E::kSign; ++code) {
    const double number = decode<E>(code);
    if (!std::isfinite(number)) break;
    if (number <= scaled) lower = number;
    if (number >= scaled) {
      upper = number;
      break;
    }
  }
  if (scaled >= E::kLargest || lower == upper) return {std::min<double>(scaled, E::kLargest), -1};
  const double ups = (scaled - lower) / (upper - lower) * 65536 + 0.5;
  const bool is_up = bits >= 65536 - std::floor(ups);
  const bool is_tie = std::abs(ups - std::round(ups)) < 0x1p-4;
  return {is_up ? upper : lower, is_tie ? (is_up ? lower : upper) : -1};
}

struct Scales {
  float encode, decode;
};
// The scales of a number's block; all numbers are finite.
Scales scales_of(const Quantized& codes, int64_t block) {
  const kernel::Format& format = *codes.format;
  const float decoded = 1.0f / codes.tensor_scale;
  if (format.per_tensor()) return {codes.tensor_scale, decoded};
  return {codes.encoding_scales[block],
          decoding_scale(format.rule, codes.scales.data(), block, decoded)};
}

TEST_P(RoundingTest, AtRandomByTheBitsOfItsPlace) {
  constexpr uint64_t kSeed = 0x123456789abcdef0;
  constexpr int64_t kFirstRow = 160;
  for (const kernel::Format& format : kernel::kFormats) {
    if (!kernel::is_floating(format.element)) continue;
    for (const QuantizedShape& shape : kQuantizedShapes) {
      const int64_t rows = shape.rows, h = shape.h;
      Array x = hard_numbers(dtype, rows, h);
      const Quantized codes = quantize_by_formula(format, x, rows, h);
      const auto block_of = [&](int64_t i) {
        if (format.per_tensor()) return int64_t{0};
        return i / h / format.block_rows * Quantized::blocks(h, format.block_columns) +
               i % h / format.block_columns;
      };
      for (const DType to : kDTypes) {
        Array out(to, rows * h);
        on(round_at_random)(format, dtype, to, x.data(), codes.of_tensor(), kSeed, kFirstRow,
                            out.data(), rows, h);
        with_formulas(format, [&]<class E>(E) {
          if constexpr (E::kFloat) {
            for (int64_t i = 0; i < rows * h; ++i) {
              const Scales scales = scales_of(codes, block_of(i));
              const Choice choice = choose<E>(std::abs(number(x, i)) * scales.encode,
                                              random_bits(kSeed, kFirstRow + i / h, i % h, h));
              const auto value = [&](double code) {
                const double exact = code * static_cast<double>(scales.decode);
                const double product = to == DType::Float64 ? exact : static_cast<float>(exact);
                return std::copysign(round_to(product, to), number(x, i));
              };
              ASSERT_TRUE(same(out[i], value(choice.one)) || same(out[i], value(choice.other)))
                  << format.name << " " << rows << " x " << h << " at " << i << ": of " << x[i]
                  << " " << out[i] << ", want " << value(choice.one);
            }
          }
        });
      }
    }
  }
}

TEST_P(RoundingTest, AtRandomNumbersOfTheFormatAndNaNStay) {
  for (const kernel::Format& format : kernel::kFormats) {
    if (!kernel::is_floating(format.element)) continue;
    for (const double special : {0.0, kInf, -kInf, kNan, 1e300}) {
      Array x(dtype, 4 * 100, 0.5);
      x.set(7, special);
      x.set(8, -0.0);
      const auto scale = scale_of_tensor(format, on(largest)(dtype, x.data(), x.size()));
      Array nearest(dtype, x.size()), out(dtype, x.size());
      on(round_to_format)(format, dtype, dtype, x.data(), scale, nearest.data(), 4, 100);
      on(round_at_random)(format, dtype, dtype, x.data(), scale, 3, 0, out.data(), 4, 100);
      for (int64_t i = 0; i < x.size(); ++i) {
        // What is far below the largest number of a block becomes zero or the least number.
        if (std::isfinite(special) && special != 0 && x[i] != special) continue;
        // The scales of E4M3 are rounded: 0.5 need be none of the block's numbers.
        if (format.rule == ScaleRule::E4M3 && x[i] == 0.5) continue;
        ASSERT_TRUE(same(out[i], nearest[i])) << format.name << " " << special << " at " << i;
      }
    }
  }
}

// ---- the Hadamard transform: its sums in another order than those of a product

TEST_P(RoundingTest, SumsAndDifferencesOfSixteenRows) {
  for (const int64_t rows : {0, 7, 16, 40}) {
    for (const int64_t h : {1, 17, 64, 333}) {
      Array x = random(rows * h), out(acc, rows * h);
      on(hadamard_rows)(dtype, x.data(), out.data(), rows, h);
      for (int64_t i = 0; i < rows * h; ++i) {
        const int64_t row = i / h % 16, first = i - row * h;
        if (i / h >= rows / 16 * 16) {
          ASSERT_EQ(out[i], x[i]) << rows << " x " << h << " at " << i;
          continue;
        }
        double sum = 0;
        for (int64_t j = 0; j < 16; ++j) {
          const bool is_odd = __builtin_popcountll(static_cast<uint64_t>(row & j)) % 2 == 1;
          sum += x[first + j * h] * kernel::kHadamardSigns[j] * (is_odd ? -0.25 : 0.25);
        }
        ASSERT_NEAR(out[i], sum, 64 * compute_epsilon()) << rows << " x " << h << " at " << i;
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
