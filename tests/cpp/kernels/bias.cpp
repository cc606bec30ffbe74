#include "kernels/bias.h"
#include "kernel_test.h"
#include "kernels/activation.h"
#include "kernels/dropout.h"
#include "kernels/glu.h"

namespace transformer_ops::cpu {
namespace {

TEST_P(KernelTest, ColumnSumAndBiasAdd) {
  for (const auto [rows, h] : kRowShapes) {
    Array x = random(rows * h), sums(acc, h, 0.5), bias = random_acc(h), y(dtype, rows * h);
    on(column_sum)(dtype, x.data(), sums.data(), rows, h);
    on(bias_add)(dtype, x.data(), bias.data(), y.data(), rows, h);
    for (int64_t i = 0; i < h; ++i) {
      double expected = 0.5, size = 1.0;
      for (int64_t r = 0; r < rows; ++r) {
        expected += x[r * h + i];
        size += std::abs(x[r * h + i]);
        expect_near(y[r * h + i], x[r * h + i] + bias[i], 4 * std::abs(x[r * h + i] + bias[i]),
                    "bias_add", i);
      }
      EXPECT_NEAR(sums[i], expected, 4 * compute_epsilon() * size) << i;
    }
  }
}

TEST_P(KernelTest, ColumnSumOfManyRows) {
  const int64_t rows = 200000, h = 3;
  Array x(dtype, rows * h, 0.1), sums(acc, h);
  on(column_sum)(dtype, x.data(), sums.data(), rows, h);
  for (int64_t i = 0; i < h; ++i) {
    const double expected = x[0] * rows;
    EXPECT_NEAR(sums[i], expected, 8 * compute_epsilon() * expected);
  }
}

TEST_P(KernelTest, ActivationBiasBackward) {
  for (Activation a : kActivations) {
    for (const auto [rows, h] : kRowShapes) {
      Array x = random(rows * h), g = random(rows * h), grad(dtype, rows * h);
      Array expected(dtype, rows * h), bias(acc, h, 0.5);
      on(activation_backward)(a, dtype, g.data(), x.data(), expected.data(), rows * h);
      on(activation_bias_backward)(a, dtype, g.data(), x.data(), grad.data(), bias.data(), rows, h);
      std::vector<double> sums(h, 0.5), size(h, 1.0);
      for (int64_t i = 0; i < rows * h; ++i) {
        // A fused multiply-add may be chosen in one of the two loops only.
        expect_near(grad[i], expected[i], 4 * std::abs(expected[i]), "grad_x", i);
        sums[i % h] += expected[i];
        size[i % h] += std::abs(expected[i]);
      }
      const double rounding = dtype == acc ? 0.0 : format(dtype).epsilon();
      for (int64_t i = 0; i < h; ++i) {
        EXPECT_NEAR(bias[i], sums[i], (rounding + 8 * compute_epsilon()) * size[i]) << i;
      }
    }
  }
}

TEST_P(KernelTest, ReluBiasBackwardFromAnyBit) {
  for (int64_t first : {0, 1, 7, 8, 13}) {
    for (const auto [rows, h] : kRowShapes) {
      const int64_t n = rows * h;
      Array x = random(first + n), y(dtype, first + n), g = random(n), grad(dtype, n);
      Array bias(acc, h);
      std::vector<uint8_t> mask((first + n + 7) / 8);
      on(relu_forward)(dtype, x.data(), y.data(), mask.data(), first + n);
      on(relu_bias_backward)(dtype, g.data(), mask.data(), first, grad.data(), bias.data(), rows,
                             h);
      std::vector<double> sums(h, 0.0), size(h, 1.0);
      for (int64_t i = 0; i < n; ++i) {
        const double expected = x[first + i] > 0 ? g[i] : 0.0;
        EXPECT_EQ(grad[i], expected) << i;
        sums[i % h] += expected;
        size[i % h] += std::abs(expected);
      }
      for (int64_t i = 0; i < h; ++i) {
        EXPECT_NEAR(bias[i], sums[i], 8 * compute_epsilon() * size[i]);
      }
    }
  }
}

TEST_P(KernelTest, DropoutBiasBackwardFromAnyBit) {
  for (double p : {0.0, 0.3, 1.0}) {
    for (int64_t first : {0, 3, 8}) {
      for (const auto [rows, h] : kRowShapes) {
        const int64_t n = rows * h;
        Array whole = random(first + n), expected(dtype, first + n), grad(dtype, n), bias(acc, h);
        std::vector<uint8_t> mask((first + n + 7) / 8);
        on(dropout_forward)(dtype, whole.data(), expected.data(), mask.data(), 5, p, 0, first + n);
        char* g = static_cast<char*>(whole.data()) + first * format(dtype).bytes;
        on(dropout_bias_backward)(dtype, g, mask.data(), first, p, grad.data(), bias.data(), rows,
                                  h);
        const double scale = p < 1 ? 1 / (1 - p) : 0.0;
        std::vector<double> sums(h, 0.0), size(h, 1.0);
        for (int64_t i = 0; i < n; ++i) {
          EXPECT_EQ(grad[i], expected[first + i]) << i;
          const bool kept = ((mask[(first + i) / 8] >> ((first + i) % 8)) & 1) != 0;
          sums[i % h] += kept ? whole[first + i] * scale : 0.0;
          size[i % h] += std::abs(whole[first + i] * scale);
        }
        for (int64_t i = 0; i < h; ++i) {
          EXPECT_NEAR(bias[i], sums[i], 8 * compute_epsilon() * size[i]) << i;
        }
      }
    }
  }
}

TEST_P(KernelTest, GluBiasBackward) {
  for (int kind = 0; kind <= static_cast<int>(GluKind::ClampedSwiGLU); ++kind) {
    for (const auto [rows, h] : kRowShapes) {
      for (int64_t interleave : {int64_t{0}, int64_t{1}, h}) {
        Glu glu{.kind = static_cast<GluKind>(kind), .interleave = interleave, .limit = 1.5};
        Array x = random(2 * rows * h), g = random(rows * h), grad(dtype, 2 * rows * h);
        Array expected(dtype, 2 * rows * h), bias(acc, 2 * h, 0.5);
        on(glu_backward)(glu, dtype, g.data(), x.data(), expected.data(), rows, h);
        on(glu_bias_backward)(glu, dtype, g.data(), x.data(), grad.data(), bias.data(), rows, h);
        std::vector<double> sums(2 * h, 0.5), size(2 * h, 1.0);
        for (int64_t i = 0; i < 2 * rows * h; ++i) {
          // A fused multiply-add may be chosen in one of the two loops only.
          expect_near(grad[i], expected[i], 4 * (1 + std::abs(expected[i])), "grad_x", i);
          sums[i % (2 * h)] += expected[i];
          size[i % (2 * h)] += std::abs(expected[i]);
        }
        const double rounding = dtype == acc ? 0.0 : format(dtype).epsilon();
        for (int64_t i = 0; i < 2 * h; ++i) {
          EXPECT_NEAR(bias[i], sums[i], (rounding + 8 * compute_epsilon()) * size[i]) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
