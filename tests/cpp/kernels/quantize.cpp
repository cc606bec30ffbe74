// Codes and scales: the scalar formulas against the nearest number of a list of all, and the
// kernels of every instruction set against the formulas, byte for byte.
#include <algorithm>

#include "kernels/quantize.h"
#include "quantized.h"

namespace transformer_ops::cpu {
namespace {

using namespace encoding;

// ---- the formulas

// What a code is worth, by its definition.
double value(Element element, uint32_t code) {
  if (element == Element::Int8) return static_cast<int8_t>(static_cast<uint8_t>(code));
  struct {
    int exponent_bits, mantissa, bias;
  } f = element == Element::E4M3   ? decltype(f){4, 3, 7}
        : element == Element::E5M2 ? decltype(f){5, 2, 15}
                                   : decltype(f){2, 1, 1};
  const uint32_t sign_bit = 1u << (f.exponent_bits + f.mantissa);
  const auto fraction = static_cast<int>(code & ((1u << f.mantissa) - 1));
  const auto exponent = static_cast<int>((code & (sign_bit - 1)) >> f.mantissa);
  const double sign = (code & sign_bit) != 0 ? -1.0 : 1.0;
  const bool last = exponent == (1 << f.exponent_bits) - 1;
  if (element == Element::E5M2 && last) return fraction == 0 ? sign * kInf : kNan;
  if (element == Element::E4M3 && last && fraction == 7) return kNan;
  const int significand = exponent == 0 ? fraction : fraction + (1 << f.mantissa);
  return sign * std::ldexp(significand, std::max(exponent, 1) - f.bias - f.mantissa);
}

template <class E>
struct ElementOf;
template <>
struct ElementOf<E4M3> {
  static constexpr Element element = Element::E4M3;
};
template <>
struct ElementOf<E5M2> {
  static constexpr Element element = Element::E5M2;
};
template <>
struct ElementOf<E2M1> {
  static constexpr Element element = Element::E2M1;
};
template <>
struct ElementOf<Int8> {
  static constexpr Element element = Element::Int8;
};

template <class E>
class EncodingTest : public testing::Test {
 protected:
  static constexpr Element kElement = ElementOf<E>::element;
  static constexpr uint32_t kCodes = kElement == Element::E2M1 ? 16 : 256;

  EncodingTest() {
    for (uint32_t code = 0; code < kCodes; ++code) {
      const double x = value(kElement, code);
      if (std::isfinite(x) && !std::signbit(x) && x <= E::kLargest) numbers_.push_back(x);
    }
    std::ranges::sort(numbers_);
    numbers_.erase(std::unique(numbers_.begin(), numbers_.end()), numbers_.end());
  }

  // The magnitude nearest to |x|; of two, the one whose code is even.
  double nearest(double x) const {
    x = std::abs(x);
    if (x >= numbers_.back()) return numbers_.back();
    const auto above = std::ranges::upper_bound(numbers_, x), below = above - 1;
    if (x - *below != *above - x) return x - *below < *above - x ? *below : *above;
    return (below - numbers_.begin()) % 2 == 0 ? *below : *above;
  }

  void expect_nearest(float x) const {
    const uint32_t code = encode<E>(x, 1.0f);
    ASSERT_LT(code, kCodes);
    const double got = decode<E>(code);
    if (std::isnan(x)) {
      if (kElement == Element::E4M3 || kElement == Element::E5M2) {
        ASSERT_TRUE(std::isnan(got));
      }
      return;
    }
    ASSERT_EQ(std::abs(got), nearest(x)) << x;
    if (kElement != Element::Int8 || got != 0) {
      ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
    }
  }

 private:
  std::vector<double> numbers_;
};

using Elements = testing::Types<E4M3, E5M2, E2M1, Int8>;
TYPED_TEST_SUITE(EncodingTest, Elements);

TYPED_TEST(EncodingTest, EveryCode) {
  for (uint32_t code = 0; code < this->kCodes; ++code) {
    const double want = value(this->kElement, code), got = decode<TypeParam>(code);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      EXPECT_TRUE(std::isnan(decode<TypeParam>(encode<TypeParam>(got, 1.0f)))) << code;
      continue;
    }
    EXPECT_EQ(got, want) << code;
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << code;
    // Infinity, and the least integer, are not what anything becomes.
    if (std::abs(want) <= TypeParam::kLargest) {
      EXPECT_EQ(encode<TypeParam>(got, 1.0f), code);
    } else {
      EXPECT_EQ(decode<TypeParam>(encode<TypeParam>(got, 1.0f)),
                std::copysign(TypeParam::kLargest, want));
    }
  }
}

TYPED_TEST(EncodingTest, EveryShortNumber) {
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    for (int bits = 0; bits < 65536; ++bits) {
      this->expect_nearest(static_cast<float>(decode16(static_cast<uint16_t>(bits), dtype)));
    }
  }
}

TYPED_TEST(EncodingTest, FloatsAroundEveryTie) {
  for (uint32_t code = 0; code + 1 < this->kCodes; ++code) {
    const double a = value(this->kElement, code), b = value(this->kElement, code + 1);
    if (!std::isfinite(a + b)) continue;
    const auto tie = static_cast<float>((a + b) / 2);
    for (const float x : {std::nextafter(tie, -1e30f), tie, std::nextafter(tie, 1e30f)}) {
      this->expect_nearest(x);
    }
  }
  for (const float x : {3.4e38f, -3.4e38f, 1e-45f, -1e-45f, 1e-38f}) this->expect_nearest(x);
}

TEST(Encoding, NormalFloats) {
  for (uint32_t code = 0; code < 16; ++code) {
    const float x = decode<NF4>(code);
    EXPECT_EQ(encode<NF4>(x, 1.0f), code);
    if (code == 15) break;
    EXPECT_LT(x, decode<NF4>(code + 1));
    // A tie is the lower number's.
    const float tie = (x + decode<NF4>(code + 1)) / 2;
    EXPECT_EQ(encode<NF4>(tie, 1.0f), code);
    EXPECT_EQ(encode<NF4>(std::nextafter(tie, 2.0f), 1.0f), code + 1);
  }
  EXPECT_EQ(decode<NF4>(0), -1.0f);
  EXPECT_EQ(decode<NF4>(7), 0.0f);
  EXPECT_EQ(encode<NF4>(-3.0f, 1.0f), 0u);
  EXPECT_EQ(encode<NF4>(static_cast<float>(kNan), 1.0f), 0u);
  // The scale is the largest magnitude, bit for bit.
  for (const float amax : {3.0f, 0.1f, 1e-45f, kMost}) {
    EXPECT_EQ(block_scale<NF4>(ScaleRule::Float32, amax, 1.0f).number, amax);
  }
}

TEST(Encoding, ScalesOfBytes) {
  EXPECT_EQ(encode_e8m0(0.0f), 0u);
  EXPECT_EQ(encode_e8m0(0x1p-127f), 0u);
  EXPECT_EQ(encode_e8m0(std::nextafter(0x1p-127f, 1.0f)), 1u);
  EXPECT_EQ(encode_e8m0(0x1p-126f), 1u);
  EXPECT_EQ(encode_e8m0(1.0f), 127u);
  EXPECT_EQ(encode_e8m0(std::nextafter(1.0f, 2.0f)), 128u);
  EXPECT_EQ(encode_e8m0(kMost), 254u);
  EXPECT_EQ(encode_e8m0(static_cast<float>(kInf)), 254u);
  EXPECT_EQ(encode_e8m0(static_cast<float>(kNan)), 255u);
  for (uint32_t byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(decode_e8m0(byte), std::ldexp(1.0, static_cast<int>(byte) - 127));
    EXPECT_EQ(encode_e8m0(decode_e8m0(byte)), byte);
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
}

TEST(Encoding, ScalesOfBlocks) {
  const auto scale = [](float amax) {
    return block_scale<E4M3>(ScaleRule::PowerOfTwo, amax, 1.0f);
  };
  for (const double nothing : {0.0, kInf, kNan}) {
    EXPECT_EQ(scale(static_cast<float>(nothing)).encode, 1.0f);
    EXPECT_EQ(scale(static_cast<float>(nothing)).number, 1.0f);
  }
  EXPECT_EQ(scale(448.0f).encode, 1.0f);
  EXPECT_EQ(scale(449.0f).encode, 0.5f);
  EXPECT_EQ(scale(449.0f).number, 2.0f);
  EXPECT_EQ(scale(kMost).encode, 0x1p-120f);
  EXPECT_EQ(scale(1e-45f).encode, 0x1p127f);
  EXPECT_EQ(encoding_scale(1e-40f, 448.0f), kMost);
  // Nothing else can tell of NaN among integers.
  const auto integers = block_scale<Int8>(ScaleRule::Float32, static_cast<float>(kNan), 1.0f);
  EXPECT_EQ(integers.encode, 0.0f);
  EXPECT_TRUE(std::isnan(integers.number));
}

TEST(Encoding, ScalesOfTensors) {
  const kernel::Format& any = *kernel::find_format("e4m3");
  const kernel::Format& power = *kernel::find_format("e4m3 pow2");
  for (const double nothing : {0.0, kInf, kNan}) {
    EXPECT_EQ(tensor_scale(power, static_cast<float>(nothing)), 1.0f);
  }
  EXPECT_EQ(tensor_scale(any, 3.0f), 448.0f / 3.0f);
  EXPECT_EQ(tensor_scale(power, 3.0f), 128.0f);
  EXPECT_EQ(tensor_scale(power, 448.0f), 1.0f);
  EXPECT_EQ(tensor_scale(power, 449.0f), 0.5f);
  EXPECT_EQ(tensor_scale(power, 1e-45f), 0x1p127f);
  EXPECT_EQ(tensor_scale(*kernel::find_format("e5m2 pow2"), 57344.0f), 1.0f);
}

TEST(Encoding, DoublesAreRoundedOnce) {
  EXPECT_EQ(to_odd(1.0), 1.0f);
  EXPECT_EQ(to_odd(1.0 + 0x1p-40), 1.0f + 0x1p-23f);
  EXPECT_EQ(to_odd(1.0 - 0x1p-40), 1.0f - 0x1p-24f);
  EXPECT_EQ(to_odd(-1e300), -kMost);
  EXPECT_EQ(to_odd(1e-300), 1e-45f);
  EXPECT_EQ(to_odd(kInf), static_cast<float>(kInf));
  EXPECT_TRUE(std::isnan(to_odd(kNan)));
  // Just above and below a tie of E4M3, by less than a float can say.
  for (const double side : {-0x1p-40, 0x1p-40}) {
    EXPECT_EQ(decode<E4M3>(encode<E4M3>(to_odd(1.0625 + side), 1.0f)), side < 0 ? 1.0f : 1.125f);
  }
}

TEST(Formats, HaveNamesOfTheirOwn) {
  for (const kernel::Format& format : kernel::kFormats) {
    EXPECT_EQ(kernel::find_format(format.name), &format);
  }
  EXPECT_EQ(kernel::find_format("fp8"), nullptr);
}

// ---- the kernels

class QuantizeTest : public KernelTest {
 protected:
  void expect_formula(const kernel::Format& format, Array& x, int64_t rows, int64_t h) {
    const Quantized want = quantize_by_formula(format, x, rows, h);
    const float amax = on(largest)(dtype, x.data(), x.size());
    EXPECT_TRUE(same_float(amax, largest_by_formula(x))) << amax;
    Quantized got(format, rows, h);
    on(quantize)(format, dtype, x.data(), scale_of_tensor(format, amax), got.codes.data(),
                 got.scales.data(), rows, h);
    ASSERT_EQ(got.codes, want.codes) << format.name << " " << rows << " x " << h;
    ASSERT_EQ(got.scales, want.scales) << format.name << " " << rows << " x " << h;
    const Array expected = dequantize_by_formula(want, dtype, rows, h);
    Array out(dtype, rows * h);
    on(dequantize)(format, dtype, want.codes.data(), want.scales.data(), 1.0f / want.tensor_scale,
                   out.data(), rows, h);
    for (int64_t i = 0; i < out.size(); ++i) {
      ASSERT_TRUE(same(out[i], expected[i])) << format.name << " " << rows << " x " << h << " at "
                                             << i << ": " << out[i] << ", want " << expected[i];
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, QuantizeTest, testing::ValuesIn(cases()), case_name);

TEST_P(QuantizeTest, EqualsTheFormulaByteForByte) {
  for (const kernel::Format& format : kernel::kFormats) {
    for (const auto& [rows, h] : kQuantizedShapes) {
      Array x = hard_numbers(dtype, rows, h);
      expect_formula(format, x, rows, h);
    }
  }
}

TEST_P(QuantizeTest, AdversarialRows) {
  for (const kernel::Format& format : kernel::kFormats) {
    for (const double special :
         {0.0, kInf, -kInf, kNan, 1e-40, 1e-45, 3.4028234663852886e38, 1e300}) {
      // One of them, and nothing else.
      for (const bool alone : {true, false}) {
        Array x = alone ? hard_numbers(dtype, 2, 200) : Array(dtype, 400, special);
        x.set(7, special);
        expect_formula(format, x, 2, 200);
      }
    }
  }
}

TEST_P(QuantizeTest, EveryShortNumber) {
  if (cpu::format(dtype).bytes != 2) GTEST_SKIP() << "16-bit dtypes only";
  for (const kernel::Format& format : kernel::kFormats) {
    Array x(dtype, 65536);
    for (int i = 0; i < 65536; ++i) x.set(i, decode16(static_cast<uint16_t>(i), dtype));
    expect_formula(format, x, 16, 4096);
    // With one scale for all, nearly all are too large or too small.
    for (int i = 0; i < 65536; ++i) {
      if (!(std::abs(x[i]) < 1e3)) x.set(i, 0.0);
    }
    expect_formula(format, x, 16, 4096);
  }
}

TEST_P(QuantizeTest, EveryCodeDecodes) {
  for (const kernel::Format& format : kernel::kFormats) {
    std::vector<float> scales = {0.0f, 0.3f, -0.5f, 0x1.8p3f, kMost, static_cast<float>(kNan)};
    for (int exponent = -149; exponent < 128; ++exponent) {
      scales.push_back(std::ldexp(1.0f, exponent));
    }
    for (const float scale : scales) {
      Quantized all(format, 1, 256);
      for (size_t i = 0; i < all.codes.size(); ++i) all.codes[i] = static_cast<uint8_t>(i);
      all.tensor_scale = 1.0f / scale;
      all.set_scales(scale);
      const Array want = dequantize_by_formula(all, dtype, 1, 256);
      Array out(dtype, 256);
      on(dequantize)(format, dtype, all.codes.data(), all.scales.data(), 1.0f / all.tensor_scale,
                     out.data(), 1, 256);
      for (int64_t i = 0; i < 256; ++i) {
        ASSERT_TRUE(same(out[i], want[i])) << format.name << " " << scale << " code " << i;
      }
    }
  }
}

// Decoded rows that go past the caches.
TEST_P(QuantizeTest, StreamedRowsAreTheSame) {
  const int64_t rows = 4099, h = 2048;
  const int64_t bytes = cpu::format(dtype).bytes;
  std::unique_ptr<char[]> memory(new char[rows * h * bytes + 64]), one(new char[h * bytes]);
  char* const out = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  Array x = hard_numbers(dtype, 1, h);
  for (const char* name : {"e4m3 1x128", "e4m3 128x1", "mx e5m2", "nvfp4"}) {
    const kernel::Format& format = *kernel::find_format(name);
    Quantized row(format, 1, h), all(format, rows, h);
    on(quantize)(format, dtype, x.data(), TensorScale(), row.codes.data(), row.scales.data(), 1, h);
    const auto repeat = [](const auto& from, auto& to) {
      for (size_t i = 0; i < to.size(); i += from.size()) std::ranges::copy(from, to.begin() + i);
    };
    repeat(row.codes, all.codes);
    repeat(row.scales, all.scales);
    on(dequantize)(format, dtype, all.codes.data(), all.scales.data(), 1.0f, out, rows, h);
    on(dequantize)(format, dtype, row.codes.data(), row.scales.data(), 1.0f, one.get(), 1, h);
    for (int64_t i = 0; i < rows; ++i) {
      ASSERT_EQ(std::memcmp(out + i * h * bytes, one.get(), h * bytes), 0) << name << " " << i;
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
