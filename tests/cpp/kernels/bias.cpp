#include "kernel_test.h"

namespace transformer_ops::cpu {
namespace {

TEST_P(KernelTest, ColumnSumAndBiasAdd) {
  for (const auto [rows, h] : kRowShapes) {
    Array x = random(rows * h), sums(acc, h, 0.5), bias = random_acc(h), y(dtype, rows * h);
    k.column_sum(dtype, x.data(), sums.data(), rows, h);
    k.bias_add(dtype, x.data(), bias.data(), y.data(), rows, h);
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
  k.column_sum(dtype, x.data(), sums.data(), rows, h);
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
      k.activation_backward(a, dtype, g.data(), x.data(), expected.data(), rows * h);
      k.activation_bias_backward(a, dtype, g.data(), x.data(), grad.data(), bias.data(), rows, h);
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
      k.relu_forward(dtype, x.data(), y.data(), mask.data(), first + n);
      k.relu_bias_backward(dtype, g.data(), mask.data(), first, grad.data(), bias.data(), rows, h);
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

}  // namespace
}  // namespace transformer_ops::cpu
