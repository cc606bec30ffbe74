// The CPU kernels of every instruction set of this machine against plain loops in double precision.
// Here: conversions, math.h and the choice of a table; the kernels themselves in kernels/.
#include "../../csrc/kernels/math.h"

#include "kernels/kernel_test.h"

namespace transformer_ops::cpu {
namespace {

INSTANTIATE_TEST_SUITE_P(All, KernelTest, testing::ValuesIn(cases()), case_name);

// ---- conversions ----

TEST_P(KernelTest, ConvertToAcc) {
  if (format(dtype).bytes != 2) GTEST_SKIP() << "16-bit dtypes only";
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> out(65536);
  k.convert_to_acc(dtype, all.data(), out.data(), 0.0, 65536);
  for (int i = 0; i < 65536; ++i) {
    const double expected = decode16(all[i], dtype);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(out[i], expected) << i;
    }
  }
}

TEST_P(KernelTest, ConvertFromAcc) {
  std::vector<double> values = {0.0,   -0.0,  1.0,  65504.0, 65519.9, 65520.0, 1e6,   3.4e38,
                                -1e-8, 6e-8,  3e-8, 2.9e-8,  1e-40,   1e-45,   kInf,  -kInf,
                                kNan,  -kNan, 1.5,  6.1e-5,  6.0e-5,  3.39e38, 1e-39, -3.4e38};
  std::mt19937 generator(5);
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(generator());
    // Every other one lies on, or next to, a tie.
    const uint32_t chosen = i % 2 == 0 ? bits : (bits & 0xffff0000u) + 0x7fff + bits % 3;
    values.push_back(__builtin_bit_cast(float, chosen));
  }
  const auto n = static_cast<int64_t>(values.size());
  Array in(acc, values), out(dtype, n);
  k.convert_from_acc(dtype, in.data(), out.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    const double expected = round_to(in[i], dtype);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(out[i], expected) << in[i];
      EXPECT_EQ(std::signbit(out[i]), std::signbit(expected)) << in[i];
    }
  }
}

TEST_P(KernelTest, ConvertAdds) {
  for (int64_t n : kSizes) {
    Array in = random(n), out(acc, n), back(dtype, n);
    k.convert_to_acc(dtype, in.data(), out.data(), 1.0, n);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(out[i], round_to(in[i] + 1.0, acc));
    k.convert_to_acc(dtype, in.data(), out.data(), 0.0, n);
    k.convert_from_acc(dtype, out.data(), back.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(back[i], in[i]);
  }
}

// ---- math.h ----

// Error in units of the last place of a float.
double ulps(float actual, double expected) {
  const double unit = std::ldexp(1.0, std::max(std::ilogb(expected), -126) - 23);
  return std::abs(actual - expected) / unit;
}

TEST(Math, ExpAndTanhAreAccurate) {
  double worst_exp = 0, worst_tanh = 0;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 3001) {
    const float x = __builtin_bit_cast(float, static_cast<uint32_t>(bits));
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(math::exp_of_nonpositive(x))) << bits;
      ASSERT_TRUE(std::isnan(math::tanh(x))) << bits;
      continue;
    }
    worst_tanh = std::max(worst_tanh, ulps(math::tanh(x), std::tanh(double{x})));
    if (x > 0) continue;
    const double exact = std::exp(double{x});
    if (exact < std::numeric_limits<float>::min()) {
      ASSERT_LE(math::exp_of_nonpositive(x), std::numeric_limits<float>::min()) << x;
    } else {
      worst_exp = std::max(worst_exp, ulps(math::exp_of_nonpositive(x), exact));
    }
  }
  EXPECT_LE(worst_exp, 1.5);
  EXPECT_LE(worst_tanh, 2.5);
  EXPECT_EQ(math::exp_of_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(math::exp_of_nonpositive(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(math::tanh(std::numeric_limits<float>::infinity()), 1.0f);
  EXPECT_TRUE(std::signbit(math::tanh(-0.0f)));
}

// ---- dispatch ----

TEST(Dispatch, ChoosesATableOfThisMachine) {
  EXPECT_EQ(kernels_for(isa_name()), &kernels());
  EXPECT_NE(kernels_for("default"), nullptr);
  EXPECT_EQ(kernels_for("mmx"), nullptr);
}

}  // namespace
}  // namespace transformer_ops::cpu
