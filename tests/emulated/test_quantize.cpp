// Byte for byte the scalar formulas of kernels/encoding.h.
#include "../cpp/kernels/quantized.h"
#include "device_test.h"
#include "kernels/quantize.h"

namespace transformer_ops::cuda {
namespace {

using cpu::Array;
using cpu::Quantized;
using kernel::Format;

class QuantizeTest : public DeviceTest {
 protected:
  Buffer copy(const Array& x) {
    Buffer buffer = make(x.size());
    for (int64_t i = 0; i < x.size(); ++i) buffer.set(i, x[i]);
    return buffer;
  }

  float largest(const Buffer& x, int64_t n) {
    std::vector<float> partials(cuda::largest_parts(n));
    cuda::largest(nullptr, dtype, x.data(), partials.data(), n);
    return partials[0];
  }

  // By the scale itself instead of the largest magnitude.
  void expect_given_scale(const Format& format, const Buffer& x, const Quantized& want,
                          int64_t rows, int64_t h) {
    Quantized got(format, rows, h);
    float decoded = 0.0f;
    cuda::quantize(nullptr, format, dtype, x.data(), /*amax=*/nullptr, &want.tensor_scale,
                   got.codes.data(), got.scales.data(), &decoded, rows, h);
    ASSERT_EQ(got.codes, want.codes) << format.name << " " << rows << " x " << h;
    ASSERT_EQ(got.scales, want.scales) << format.name << " " << rows << " x " << h;
    EXPECT_EQ(decoded, 1.0f / want.tensor_scale);
  }

  void expect_formula(const Format& format, const Array& numbers, int64_t rows, int64_t h) {
    const Quantized want = cpu::quantize_by_formula(format, numbers, rows, h);
    const Buffer x = copy(numbers);
    const float amax = largest(x, rows * h);
    EXPECT_TRUE(cpu::same_float(amax, cpu::largest_by_formula(numbers))) << amax;
    Quantized got(format, rows, h);
    const bool of_tensor = format.per_tensor() || format.has_tensor_scale();
    float decoded = 1.0f;
    got.codes.push_back(0xa5);
    got.scales.push_back(0xa5);
    cuda::quantize(nullptr, format, dtype, x.data(), of_tensor ? &amax : nullptr,
                   /*tensor_scale=*/nullptr, got.codes.data(), got.scales.data(),
                   of_tensor ? &decoded : nullptr, rows, h);
    EXPECT_EQ(got.codes.back(), 0xa5) << "after the codes";
    EXPECT_EQ(got.scales.back(), 0xa5) << "after the scales";
    got.codes.pop_back();
    got.scales.pop_back();
    ASSERT_EQ(got.codes, want.codes) << format.name << " " << rows << " x " << h;
    ASSERT_EQ(got.scales, want.scales) << format.name << " " << rows << " x " << h;
    EXPECT_EQ(decoded, 1.0f / want.tensor_scale);
    if (of_tensor && !format.chooses_scale()) expect_given_scale(format, x, want, rows, h);
    const Array expected = cpu::dequantize_by_formula(want, dtype, rows, h);
    const Buffer out = make(rows * h);
    cuda::dequantize(nullptr, format, dtype, want.codes.data(), want.scales.data(),
                     of_tensor ? &decoded : nullptr, out.data(), rows, h);
    for (int64_t i = 0; i < rows * h; ++i) {
      ASSERT_TRUE(cpu::same(out[i], expected[i]))
          << format.name << " at " << i << ": " << out[i] << ", want " << expected[i];
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Cuda, QuantizeTest, testing::ValuesIn(cases()), case_name);

TEST_P(QuantizeTest, EqualsTheFormulaByteForByte) {
  for (const Format& format : kernel::kFormats) {
    for (const auto& [rows, h] : cpu::kQuantizedShapes) {
      expect_formula(format, cpu::hard_numbers(dtype, rows, h), rows, h);
    }
  }
}

TEST_P(QuantizeTest, AdversarialRows) {
  for (const Format& format : kernel::kFormats) {
    for (const double special : {0.0, cpu::kInf, cpu::kNan, 1e-40, 1e-45, 3.4028234663852886e38}) {
      for (const bool alone : {true, false}) {
        Array x = alone ? cpu::hard_numbers(dtype, 2, 200) : Array(dtype, 400, special);
        x.set(7, special);
        expect_formula(format, x, 2, 200);
      }
    }
  }
}

// The codes of the formula, of two rows in a byte instead of two columns.
std::vector<uint8_t> pairs_of_rows(const std::vector<uint8_t>& codes, int64_t rows, int64_t h) {
  std::vector<uint8_t> pairs(static_cast<size_t>((rows + 1) / 2 * h));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < h; ++j) {
      const uint8_t both = codes[static_cast<size_t>(i * ((h + 1) / 2) + j / 2)];
      const int code = j % 2 == 0 ? both & 0xf : both >> 4;
      uint8_t& pair = pairs[static_cast<size_t>(i / 2 * h + j)];
      pair = static_cast<uint8_t>(pair | (i % 2 == 0 ? code : code << 4));
    }
  }
  return pairs;
}

TEST_P(QuantizeTest, PairsOfRowsHaveTheSameCodes) {
  for (const Format& format : kernel::kFormats) {
    if (format.element != kernel::Element::E2M1 || format.block_rows != 16) continue;
    for (const auto& [rows, h] : cpu::kQuantizedShapes) {
      const Array numbers = cpu::hard_numbers(dtype, rows, h);
      const Quantized want = cpu::quantize_by_formula(format, numbers, rows, h);
      const Buffer x = copy(numbers);
      const float amax = largest(x, rows * h);
      std::vector<uint8_t> codes = pairs_of_rows(want.codes, rows, h), got(codes.size() + 1, 0xa5);
      codes.push_back(0xa5);
      Quantized found(format, rows, h);
      float decoded = 0.0f;
      quantize_row_pairs(nullptr, format, dtype, x.data(), &amax, got.data(), found.scales.data(),
                         &decoded, rows, h);
      ASSERT_EQ(got, codes) << format.name << " " << rows << " x " << h;
      ASSERT_EQ(found.scales, want.scales) << format.name << " " << rows << " x " << h;
      EXPECT_EQ(decoded, 1.0f / want.tensor_scale);
    }
  }
}

// More packs than one round of the threads has.
TEST_P(QuantizeTest, TheLargestOfMany) {
  const int64_t n = 20011;
  for (const int64_t at : {0, 9999, 20010}) {
    const Buffer x = random(n);
    x.set(at, -1000.0);
    EXPECT_EQ(largest(x, n), cpu::round_to(1000.0, dtype));
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
