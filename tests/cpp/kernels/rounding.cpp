// Rounding to the numbers of a format: to the nearest, bit for bit what codes and back give; at
// random, the two numbers around each.
#include <algorithm>

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

  Bytes through_codes(const kernel::Format& format, DType to, const void* x, float scale,
                      int64_t rows, int64_t h) {
    Quantized codes(format, rows, h);
    on(quantize)(format, dtype, x, scale, codes.codes.data(), codes.scales.data(), rows, h);
    Bytes out(rows * h * bytes_of(to));
    on(dequantize)(format, to, codes.codes.data(), codes.scales.data(), 1.0f / scale, out.data(),
                   rows, h);
    return out;
  }

  void expect_codes(const kernel::Format& format, DType to, const void* x, int64_t rows,
                    int64_t h) {
    const float amax = on(largest)(dtype, x, rows * h), scale = tensor_scale(format, amax);
    const Bytes want = through_codes(format, to, x, scale, rows, h);
    Bytes got(want.size());
    on(round_to_format)(format, dtype, to, x, scale, 1.0f / scale, got.data(), rows, h);
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

// Of any exponent, and of a few exponents below that of the largest.
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

}  // namespace
}  // namespace transformer_ops::cpu
