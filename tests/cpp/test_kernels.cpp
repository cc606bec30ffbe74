// The CPU kernels of every instruction set of this machine against plain loops in double precision.
// Here: conversions and the choice of kernels; the kernels themselves in kernels/.
#include <algorithm>
#include <set>

#include "kernels/bias.h"
#include "kernels/convert.h"
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
  on(convert_to_acc)(dtype, all.data(), out.data(), 0.0, 65536);
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
  on(convert_from_acc)(dtype, in.data(), out.data(), n);
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
    on(convert_to_acc)(dtype, in.data(), out.data(), 1.0, n);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(out[i], round_to(in[i] + 1.0, acc));
    on(convert_to_acc)(dtype, in.data(), out.data(), 0.0, n);
    on(convert_from_acc)(dtype, out.data(), back.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(back[i], in[i]);
  }
}

// ---- dispatch ----

TEST(Dispatch, ChoosesAnInstructionSetOfThisMachine) {
  const char* const kernels = processor().kernels;
  EXPECT_TRUE(has_isa(kernels));
  EXPECT_FALSE(has_isa("mmx"));
  EXPECT_EQ(&find(bias_add.name()), &find_for(kernels, bias_add.name()));
}

TEST(Dispatch, AProcessorHasWhatLowerLevelsHave) {
  const Processor& found = processor();
  EXPECT_EQ(&found, &processor());
  const auto levels = processor_levels();
  EXPECT_NE(std::find(levels.begin(), levels.end(), found.level), levels.end());
  EXPECT_TRUE(has_isa(found.kernels));
  EXPECT_LE(found.multiplies_half, found.multiplies_bfloat16);
  EXPECT_LE(found.multiplies_bfloat16, found.converts_half);
  EXPECT_FALSE(found.multiplies_bfloat16 && found.onednn_emulates_bfloat16);
}

TEST(Dispatch, EachInstructionSetHasAKernelOfItsOwn) {
  std::set<const void*> kernels;
  size_t isas = 0;
  for (const char* isa : {"default", "avx2", "avx512"}) {
    if (!has_isa(isa)) continue;
    auto* const kernel = bias_add.function_of(find_for(isa, bias_add.name()));
    kernels.insert(reinterpret_cast<const void*>(kernel));
    ++isas;
  }
  EXPECT_GE(isas, 1u);
  EXPECT_EQ(kernels.size(), isas);
}

namespace entry {
double only_default(double x) { return 2.0 * x; }
}  // namespace entry

const Kernel<double(double)> only_default{"only_default"}, unfilled{"unfilled"};
TRANSFORMER_OPS_KERNEL(only_default, "default");

TEST(Dispatch, ASlotOfAnotherTypeThanItsKernelIsAnError) {
  const Kernel<float(double)> declared_otherwise{"only_default"};
  try {
    declared_otherwise(1.0);
    FAIL() << "must raise";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "[kernels] only_default must be a FfdE for default, got a FddE");
  }
}

TEST(Dispatch, ASlotIsFilledByTheNextLowerInstructionSet) {
  EXPECT_EQ(only_default(1.5), 3.0);
  EXPECT_EQ(only_default(2.0), 4.0);
  for (const char* isa : {"default", "avx2", "avx512"}) {
    if (has_isa(isa)) {
      EXPECT_EQ(&find_for(isa, "only_default"), &find_for("default", "only_default")) << isa;
    }
  }
}

TEST(Dispatch, ASlotThatNothingFillsSaysSo) {
  try {
    unfilled(1.0);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()), "[kernels] unfilled must have a CPU kernel for " +
                                             std::string(processor().kernels) +
                                             " or a lower instruction set, got none");
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
