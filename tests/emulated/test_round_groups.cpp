// Each group byte for byte as a tensor of its own, by the scalar formulas of kernels/encoding.h.
#include "../cpp/kernels/quantized.h"
#include "device_test.h"
#include "kernels/quantize.h"

namespace transformer_ops::cuda {
namespace {

using cpu::Array;
using kernel::Format;

// Where groups end: in rows, and in bands of a format.
struct Ends {
  std::vector<int64_t> rows, bands;

  Ends(const Format& format, const std::vector<int64_t>& sizes) {
    const int64_t height = std::max<int64_t>(format.block_rows, 1);
    int64_t row = 0, band = 0;
    for (const int64_t size : sizes) {
      rows.push_back(row += size);
      bands.push_back(band += (size + height - 1) / height);
    }
  }
  GroupEnds view() const { return {rows.data(), bands.data(), std::ssize(rows)}; }
};

Array part(const Array& x, int64_t first, int64_t count, DType dtype) {
  Array found(dtype, count);
  for (int64_t i = 0; i < count; ++i) found.set(i, x[first + i]);
  return found;
}

class RoundGroupsTest : public DeviceTest {
 protected:
  void expect_formula(const Format& format, DType to, const Array& numbers,
                      const std::vector<int64_t>& sizes, int64_t rows, int64_t h) {
    const Ends ends(format, sizes);
    const Buffer x = make(rows * h), out = make(to, rows * h);
    for (int64_t i = 0; i < rows * h; ++i) x.set(i, numbers[i]);
    std::vector<float> amax(sizes.size() + 1, -1.0f), scales;
    cuda::largest_of_groups(nullptr, dtype, x.data(), ends.view(), amax.data(), rows, h);
    const bool of_tensor = format.per_tensor() || format.has_tensor_scale();
    round(format, to, x, ends, of_tensor ? amax.data() : nullptr, nullptr, out, rows, h);
    int64_t first = 0;
    for (size_t group = 0; group < sizes.size(); ++group) {
      const Array own = part(numbers, first * h, sizes[group] * h, dtype);
      const float largest = own.size() > 0 ? cpu::largest_by_formula(own) : -1.0f;
      EXPECT_TRUE(cpu::same_float(amax[group], largest)) << amax[group] << ", want " << largest;
      const auto codes = cpu::quantize_by_formula(format, own, sizes[group], h);
      scales.push_back(codes.tensor_scale);
      const Array want = cpu::dequantize_by_formula(codes, to, sizes[group], h);
      for (int64_t i = 0; i < want.size(); ++i) {
        ASSERT_TRUE(cpu::same(out[first * h + i], want[i]))
            << format.name << " group " << group << " at " << i << ": " << out[first * h + i]
            << ", want " << want[i];
      }
      first += sizes[group];
    }
    EXPECT_EQ(amax.back(), -1.0f) << "after the groups";
    for (int64_t i = first * h; i < rows * h; ++i) ASSERT_EQ(out[i], 0.0) << "in no group";
    if (format.chooses_scale()) return;
    // By the scales themselves.
    const Buffer again = make(to, rows * h);
    round(format, to, x, ends, nullptr, of_tensor ? scales.data() : nullptr, again, rows, h);
    for (int64_t i = 0; i < rows * h; ++i) ASSERT_TRUE(cpu::same(again[i], out[i]));
  }

  void round(const Format& format, DType to, const Buffer& x, const Ends& ends, const float* amax,
             const float* scales, const Buffer& out, int64_t rows, int64_t h) const {
    cuda::round_groups(nullptr, format, dtype, to, x.data(), ends.view(), amax, scales, out.data(),
                       rows, h);
  }
};

INSTANTIATE_TEST_SUITE_P(Cuda, RoundGroupsTest, testing::ValuesIn(cases()), case_name);

TEST_P(RoundGroupsTest, EqualsTheFormulaByteForByte) {
  struct Shape {
    std::vector<int64_t> sizes;
    int64_t rows, h;
  };
  const Shape shapes[] = {{{40, 0, 3, 57}, 104, 33}, {{1, 17, 0, 16}, 34, 128}, {{}, 5, 8},
                          {{0, 0}, 20, 5},           {{129, 3}, 140, 24},       {{2, 3}, 5, 0}};
  for (const Format& format : kernel::kFormats) {
    for (const auto& [sizes, rows, h] : shapes) {
      for (const DType to : {dtype, other}) {
        expect_formula(format, to, cpu::hard_numbers(dtype, rows, h), sizes, rows, h);
      }
    }
  }
}

// A special number changes what is in its group alone.
TEST_P(RoundGroupsTest, AdversarialRows) {
  for (const Format& format : kernel::kFormats) {
    for (const double special : {0.0, cpu::kInf, cpu::kNan, 1e-40, 1e-45, 3.4028234663852886e38}) {
      Array x = cpu::hard_numbers(dtype, 40, 40);
      for (const int64_t i : {7, 16 * 40, 39 * 40}) x.set(i, special);
      expect_formula(format, other, x, {16, 1, 0, 20}, 40, 40);
    }
  }
}

// More packs than a block of threads has, in groups that begin anywhere.
TEST_P(RoundGroupsTest, TheLargestOfMany) {
  const std::vector<int64_t> sizes = {4000, 0, 1, 3, 3000, 500};
  const Ends ends(kernel::kFormats[0], sizes);
  const int64_t rows = 8000, h = 24;
  const Buffer x = make(rows * h);
  for (int64_t i = 0; i < rows * h; ++i) x.set(i, 0.5);
  std::vector<float> want;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    if (size > 0) x.set((first + size) * h - 1, -2.0 - static_cast<double>(size % 7));
    want.push_back(size > 0 ? 2.0f + static_cast<float>(size % 7) : -1.0f);
    first += size;
  }
  for (int64_t i = first * h; i < rows * h; ++i) x.set(i, 1000.0);
  std::vector<float> amax(sizes.size(), -1.0f);
  cuda::largest_of_groups(nullptr, dtype, x.data(), ends.view(), amax.data(), rows, h);
  EXPECT_EQ(amax, want);
}

}  // namespace
}  // namespace transformer_ops::cuda
