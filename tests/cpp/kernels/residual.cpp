#include "kernel_test.h"
#include "kernels/bias.h"
#include "kernels/dropout.h"
#include "kernels/glu.h"
#include "kernels/norm.h"

namespace transformer_ops::cpu {
namespace {

TEST_P(KernelTest, BiasDropoutAdd) {
  const uint64_t seed = 0x123456789abcdef0u;
  for (double p : {0.0, 0.1, 0.5, 1.0}) {
    for (int64_t first : {int64_t{0}, int64_t{8}, (int64_t{1} << 34) - 64}) {
      for (int64_t n : kSizes) {
        for (int64_t h : {1, 7, 300, 2048}) {
          Array x = random(n), bias = random_acc(h), extra = random(n), ones(dtype, n, 1.0);
          Array y(dtype, n), kept(dtype, n), without_mask(dtype, n);
          std::vector<uint8_t> mask((n + 7) / 8, 0xff), expected_mask = mask;
          on(dropout_forward)(dtype, ones.data(), kept.data(), expected_mask.data(), seed, p, first,
                              n);
          on(bias_dropout_add)(dtype, dtype, x.data(), bias.data(), extra.data(), y.data(),
                               mask.data(), seed, p, first, n, h);
          on(bias_dropout_add)(dtype, dtype, x.data(), bias.data(), extra.data(),
                               without_mask.data(), nullptr, seed, p, first, n, h);
          ASSERT_EQ(mask, expected_mask);
          const double scale = p < 1 ? 1 / (1 - p) : 0.0;
          for (int64_t i = 0; i < n; ++i) {
            const bool keep = (mask[i / 8] >> (i % 8)) & 1;
            const double dropped = keep ? (x[i] + bias[(first + i) % h]) * scale : 0.0;
            expect_near(y[i], dropped + extra[i], 8 * (std::abs(dropped) + std::abs(extra[i])),
                        "bias_dropout_add", i);
            ASSERT_EQ(y[i], without_mask[i]);
          }
        }
      }
    }
  }
}

TEST_P(KernelTest, BiasDropoutAddToAResidualInTheComputeType) {
  const int64_t n = 1000, h = 40;
  Array x = random(n), bias = random_acc(h), extra = random_acc(n), y(acc, n);
  std::vector<uint8_t> mask(n / 8);
  on(bias_dropout_add)(dtype, acc, x.data(), bias.data(), extra.data(), y.data(), mask.data(), 7,
                       0.5, 0, n, h);
  for (int64_t i = 0; i < n; ++i) {
    const bool keep = (mask[i / 8] >> (i % 8)) & 1;
    const double dropped = keep ? (x[i] + bias[i % h]) * 2 : 0.0;
    const double size = std::abs(dropped) + std::abs(extra[i]);
    EXPECT_NEAR(y[i], dropped + extra[i], 8 * compute_epsilon() * size) << i;
  }
}

TEST_P(KernelTest, BiasDropoutAddOverItsInput) {
  const int64_t n = 1000, h = 40;
  Array x = random(n), bias = random_acc(h), extra = random(n), y(dtype, n);
  on(bias_dropout_add)(dtype, dtype, x.data(), bias.data(), extra.data(), y.data(), nullptr, 7, 0.3,
                       0, n, h);
  on(bias_dropout_add)(dtype, dtype, x.data(), bias.data(), extra.data(), x.data(), nullptr, 7, 0.3,
                       0, n, h);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(x[i], y[i]) << i;
}

TEST_P(KernelTest, BiasDropoutAddIsTheResidualWhereDroppedWhateverTheInput) {
  Array x(dtype, 100, kNan), bias(acc, 10), extra = random(100), y(dtype, 100);
  std::vector<uint8_t> mask(13);
  on(bias_dropout_add)(dtype, dtype, x.data(), bias.data(), extra.data(), y.data(), mask.data(), 7,
                       0.5, 0, 100, 10);
  for (int64_t i = 0; i < 100; ++i) {
    if ((mask[i / 8] >> (i % 8)) & 1) {
      EXPECT_TRUE(std::isnan(y[i])) << i;
    } else {
      EXPECT_EQ(y[i], extra[i]) << i;
    }
  }
}

// The norm is bit for bit that of the rounded sum, whether the sum is kept or not.
TEST_P(KernelTest, AddAndNorm) {
  for (const RowShape& shape : kRowShapes) {
    const int64_t rows = shape.rows, h = shape.h, n = rows * h;
    Array x = random(n), extra = random(n), gamma = random_acc(h, 1.0), beta = random_acc(h);
    Array sum(dtype, n), y(dtype, n), mean(acc, rows), rstd(acc, rows);
    Array want_y(dtype, n), want_mean(acc, rows), want_rstd(acc, rows), unkept(dtype, n);
    const auto expect_same = [&](bool layer_norm) {
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(sum[i], round_to(x[i] + extra[i], dtype)) << i;
        ASSERT_EQ(y[i], want_y[i]) << i;
        ASSERT_EQ(unkept[i], want_y[i]) << i;
      }
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_EQ(rstd[r], want_rstd[r]) << r;
        if (layer_norm) {
          ASSERT_EQ(mean[r], want_mean[r]) << r;
        }
      }
    };
    on(add_layer_norm_forward)(dtype, x.data(), extra.data(), gamma.data(), beta.data(), 1e-3,
                               nullptr, unkept.data(), mean.data(), rstd.data(), rows, h);
    on(add_layer_norm_forward)(dtype, x.data(), extra.data(), gamma.data(), beta.data(), 1e-3,
                               sum.data(), y.data(), mean.data(), rstd.data(), rows, h);
    on(layer_norm_forward)(dtype, sum.data(), gamma.data(), beta.data(), 1e-3, want_y.data(),
                           want_mean.data(), want_rstd.data(), rows, h);
    expect_same(/*layer_norm=*/true);
    on(add_rms_norm_forward)(dtype, x.data(), extra.data(), gamma.data(), 1e-3, nullptr,
                             unkept.data(), rstd.data(), rows, h);
    on(add_rms_norm_forward)(dtype, x.data(), extra.data(), gamma.data(), 1e-3, sum.data(),
                             y.data(), rstd.data(), rows, h);
    on(rms_norm_forward)(dtype, sum.data(), gamma.data(), 1e-3, want_y.data(), want_rstd.data(),
                         rows, h);
    expect_same(/*layer_norm=*/false);
  }
}

Glu make_glu(GluKind kind, int64_t interleave) {
  return {.kind = kind, .interleave = interleave, .beta1 = 0.5, .beta2 = 2.0, .limit = 0.8};
}

// Bit for bit the GLU of the rounded x + bias.
TEST_P(KernelTest, BiasGlu) {
  for (int kind = 0; kind <= static_cast<int>(GluKind::ClampedSwiGLU); ++kind) {
    for (int64_t interleave : {0, 4}) {
      const Glu glu = make_glu(static_cast<GluKind>(kind), interleave);
      for (const auto [rows, h] : {RowShape{0, 8}, RowShape{3, 4}, RowShape{5, 600}}) {
        Array x = random(rows * 2 * h), bias = random_acc(2 * h), sum(dtype, rows * 2 * h);
        Array kept(dtype, rows * 2 * h), y(dtype, rows * h), want(dtype, rows * h);
        Array unkept(dtype, rows * h);
        on(bias_add)(dtype, x.data(), bias.data(), sum.data(), rows, 2 * h);
        on(glu_forward)(glu, dtype, sum.data(), want.data(), rows, h);
        on(bias_glu_forward)(glu, dtype, x.data(), bias.data(), nullptr, unkept.data(), rows, h);
        on(bias_glu_forward)(glu, dtype, x.data(), bias.data(), kept.data(), y.data(), rows, h);
        on(bias_glu_forward)(glu, dtype, x.data(), bias.data(), x.data(), y.data(), rows, h);
        for (int64_t i = 0; i < rows * 2 * h; ++i) {
          ASSERT_EQ(kept[i], sum[i]) << i;
          ASSERT_EQ(x[i], sum[i]) << i;
        }
        for (int64_t i = 0; i < rows * h; ++i) {
          // A fused multiply-add may be chosen in one of the two loops only.
          expect_near(y[i], want[i], 8 * std::abs(want[i]), "y", i);
          ASSERT_EQ(y[i], unkept[i]) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
