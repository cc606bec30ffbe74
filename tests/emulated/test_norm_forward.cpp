#include "norm_test.h"

namespace transformer_ops::cuda {
namespace {

INSTANTIATE_TEST_SUITE_P(Forward, NormTest, testing::ValuesIn(cases()), case_name);

constexpr double kEps = 1e-3;

struct Shape {
  int64_t rows, h;
};
// Rows within a warp, of one warp, and of several; whole packs and not; a last block that is not
// full.
constexpr Shape kShapes[] = {{1, 1}, {131, 1}, {70, 8}, {9, 24}, {40, 100}, {3, 1000}, {20, 2056}};

TEST_P(NormTest, Forward) {
  for (const auto [rows, h] : kShapes) {
    for (const Norm norm : kNorms) {
      const bool centered = norm == Norm::LayerNorm, scaled = norm != Norm::L2;
      const Array x = random(rows * h), y = make(rows * h), again = make(rows * h);
      const Array gamma = random(other, h), beta = random(h);
      const Array mean = make(acc, centered ? rows : 0), rstd = make(acc, rows);
      NormForward call{.norm = norm,
                       .dtype = dtype,
                       .x = x.data(),
                       .eps = kEps,
                       .y = y.data(),
                       .mean = centered ? mean.data() : nullptr,
                       .rstd = rstd.data(),
                       .rows = rows,
                       .h = h};
      if (scaled) call.gamma = gamma.vector(1.0);
      if (centered) call.beta = beta.vector();
      norm_forward(nullptr, call);
      const std::vector<double> in = x.values();
      for (int64_t r = 0; r < rows; ++r) {
        const auto s = statistics(norm, &in[r * h], h, kEps);
        if (centered) expect_value(mean, r, s.mean, 4, "mean");
        expect_value(rstd, r, s.rstd, s.rstd * (1 + s.rstd), "rstd");
        for (int64_t i = 0; i < h; ++i) {
          const double weight = scaled ? gamma[i] + 1 : 1, shift = centered ? beta[i] : 0;
          const double n = (in[r * h + i] - s.mean) * s.rstd;
          const double size = (1 + s.rstd) * (std::abs(n) + 1) * std::abs(weight) + std::abs(shift);
          expect_value(y, r * h + i, n * weight + shift, size, "y");
        }
      }
      normalize(nullptr, {.dtype = dtype,
                          .x = x.data(),
                          .mean = call.mean,
                          .rstd = rstd.data(),
                          .gamma = call.gamma,
                          .beta = call.beta,
                          .y = again.data(),
                          .rows = rows,
                          .h = h});
      EXPECT_TRUE(again == y) << "normalize, h = " << h;
      call.y = const_cast<void*>(call.x);
      norm_forward(nullptr, call);
      EXPECT_TRUE(x == y) << "in place, h = " << h;
    }
  }
}

// The norm of a sum is that of the sum as it is rounded, bit for bit; whoever keeps the sum.
TEST_P(NormTest, ForwardOfASum) {
  for (const auto [rows, h] : kShapes) {
    for (const Norm norm : kNorms) {
      const Array x = random(rows * h), extra = random(rows * h), gamma = random(h);
      const Array sum = make(rows * h), y = make(rows * h), expected = make(rows * h);
      const Array mean = make(acc, rows), rstd = make(acc, rows);
      const Array expected_rstd = make(acc, rows);
      NormForward call{.norm = norm,
                       .dtype = dtype,
                       .x = x.data(),
                       .extra = extra.data(),
                       .gamma = gamma.vector(),
                       .eps = kEps,
                       .sum = sum.data(),
                       .y = y.data(),
                       .mean = mean.data(),
                       .rstd = rstd.data(),
                       .rows = rows,
                       .h = h};
      norm_forward(nullptr, call);
      for (int64_t i = 0; i < rows * h; ++i) {
        const double exact = x[i] + extra[i];
        const double rounded = acc == DType::Float32 ? static_cast<float>(exact) : exact;
        ASSERT_EQ(sum[i], cpu::round_to(rounded, dtype)) << i;
      }
      NormForward plain = call;
      plain.x = sum.data();
      plain.extra = plain.sum = nullptr;
      plain.y = expected.data();
      plain.rstd = expected_rstd.data();
      norm_forward(nullptr, plain);
      EXPECT_TRUE(y == expected);
      EXPECT_TRUE(rstd == expected_rstd);
      call.sum = nullptr;
      call.y = const_cast<void*>(call.extra);
      norm_forward(nullptr, call);
      EXPECT_TRUE(extra == expected) << "over the extra input";
    }
  }
}

// Longer than shared memory.
TEST_P(NormTest, ForwardOfLongRows) {
  const int64_t h = (int64_t{230} << 10) / cpu::format(dtype).bytes + 8;
  const Array x = random(h), extra = random(h), gamma = random(h), y = make(h), sum = make(h);
  const Array expected = make(h), mean = make(acc, 1), rstd = make(acc, 1);
  for (const Norm norm : kNorms) {
    NormForward call{.norm = norm,
                     .dtype = dtype,
                     .x = x.data(),
                     .extra = extra.data(),
                     .gamma = gamma.vector(),
                     .eps = kEps,
                     .sum = sum.data(),
                     .y = y.data(),
                     .mean = mean.data(),
                     .rstd = rstd.data(),
                     .rows = 1,
                     .h = h};
    norm_forward(nullptr, call);
    const std::vector<double> in = sum.values();
    const auto s = statistics(norm, in.data(), h, kEps);
    expect_value(rstd, 0, s.rstd, s.rstd, "rstd");
    for (int64_t i = 0; i < h; ++i) {
      const double n = (in[i] - s.mean) * s.rstd;
      expect_value(y, i, n * gamma[i], (1 + std::abs(n)) * std::abs(gamma[i]), "y");
    }
    call.sum = nullptr;
    call.y = expected.data();
    norm_forward(nullptr, call);
    EXPECT_TRUE(expected == y) << "without the sum";
    normalize(nullptr, {.dtype = dtype,
                        .x = sum.data(),
                        .mean = norm == Norm::LayerNorm ? mean.data() : nullptr,
                        .rstd = rstd.data(),
                        .gamma = call.gamma,
                        .y = expected.data(),
                        .rows = 1,
                        .h = h});
    EXPECT_TRUE(expected == y) << "normalize";
  }
}

// E[x^2] - E[x]^2 would lose all digits.
TEST_P(NormTest, VarianceOfNumbersFarFromZero) {
  const int64_t h = 512;
  const double offset = dtype == DType::Float64 ? 1e8 : dtype == DType::Float32 ? 4096 : 128;
  const Array x = make(h), y = make(h), mean = make(acc, 1), rstd = make(acc, 1);
  for (int64_t i = 0; i < h; ++i) x.set(i, offset + static_cast<double>(i % 2));
  norm_forward(nullptr, {.norm = Norm::LayerNorm,
                         .dtype = dtype,
                         .x = x.data(),
                         .eps = 0,
                         .y = y.data(),
                         .mean = mean.data(),
                         .rstd = rstd.data(),
                         .rows = 1,
                         .h = h});
  EXPECT_NEAR(rstd[0], 2.0, 1e-5);
  for (int64_t i = 0; i < h; ++i) EXPECT_NEAR(y[i], i % 2 == 0 ? -1.0 : 1.0, 1e-3);
}

TEST_P(NormTest, ForwardWithoutNumbersAndWithOddOnes) {
  const int64_t h = 40;
  const Array x = random(3 * h), y = make(3 * h), rstd = make(acc, 3);
  x.set(3, cpu::kNan);
  x.set(h + 5, cpu::kInf);
  for (int64_t i = 0; i < h; ++i) x.set(2 * h + i, 0.0);
  NormForward call{.norm = Norm::RMSNorm,
                   .dtype = dtype,
                   .x = x.data(),
                   .eps = 0.0625,
                   .y = y.data(),
                   .rstd = rstd.data(),
                   .rows = 0,
                   .h = h};
  const Array before(y);
  norm_forward(nullptr, call);
  normalize(nullptr,
            {.dtype = dtype, .x = x.data(), .rstd = rstd.data(), .y = y.data(), .rows = 0, .h = h});
  EXPECT_TRUE(y == before) << "no rows";
  call.rows = 3;
  norm_forward(nullptr, call);
  for (int64_t i = 0; i < h; ++i) {
    EXPECT_TRUE(std::isnan(y[i]));
    EXPECT_TRUE(i == 5 ? std::isnan(y[h + i]) : y[h + i] == 0);
    EXPECT_EQ(y[2 * h + i], 0);
  }
  EXPECT_EQ(rstd[2], 4);
  // Rows without elements have a rstd too.
  call.norm = Norm::L2;
  call.h = 0;
  rstd.set(0, 0);
  norm_forward(nullptr, call);
  for (int64_t r = 0; r < 3; ++r) EXPECT_EQ(rstd[r], 4);
}

}  // namespace
}  // namespace transformer_ops::cuda
