// Backward and value in one pass give what the two kernels give alone.
#include <cmath>

#include "kernel_test.h"
#include "kernels/activation.h"
#include "kernels/glu.h"

namespace transformer_ops::cpu {
namespace {

TEST_P(KernelTest, ActivationValueAndBackward) {
  for (int kind = 0; kind <= static_cast<int>(Activation::SiLU); ++kind) {
    const auto activation = static_cast<Activation>(kind);
    for (const auto [rows, h] : kRowShapes) {
      // A slice of columns, and all of them.
      for (const int64_t n : {h, h / 2}) {
        if (n == 0) continue;
        const int64_t size = format(dtype).bytes, first = h - n;
        Array x = random(rows * h), g = random(rows * n), y(dtype, rows * h);
        on(activation_forward)(activation, dtype, x.data(), y.data(), rows * h);
        Array wide(dtype, rows * h), expected(dtype, rows * h), grad(dtype, rows * h, 0.25);
        for (int64_t i = 0; i < rows * n; ++i) wide.set(i / n * h + first + i % n, g[i]);
        on(activation_backward)(activation, dtype, wide.data(), x.data(), expected.data(),
                                rows * h);
        Array bias(acc, n, 0.5), again(dtype, rows * n), other(dtype, rows * h, 0.25);
        for (int64_t i = 0; i < rows * n; ++i) again.set(i, g[i]);
        on(activation_value_and_backward)(
            activation, dtype, g.data(), static_cast<char*>(x.data()) + first * size,
            static_cast<char*>(grad.data()) + first * size, bias.data(), rows, n, h);
        on(activation_value_and_backward)(
            activation, dtype, again.data(), static_cast<char*>(x.data()) + first * size,
            static_cast<char*>(other.data()) + first * size, nullptr, rows, n, h);
        std::vector<double> sums(n, 0.5), sizes(n, 1.0);
        for (int64_t i = 0; i < rows * h; ++i) {
          const int64_t column = i % h - first;
          if (column < 0) {
            EXPECT_EQ(grad[i], 0.25) << "outside the slice";
            EXPECT_EQ(other[i], 0.25) << "outside the slice";
            continue;
          }
          const double want = expected[i];
          EXPECT_EQ(other[i], grad[i]) << "without sums";
          EXPECT_EQ(again[i / h * n + column], g[i / h * n + column]) << "without sums";
          expect_near(grad[i], want, 4 * (1 + std::abs(want)), "grad_x", i);
          expect_near(g[i / h * n + column], y[i], 4 * (1 + std::abs(y[i])), "y", i);
          sums[column] += want;
          sizes[column] += std::abs(want);
        }
        const double rounding = dtype == acc ? 0.0 : format(dtype).epsilon();
        for (int64_t i = 0; i < n; ++i) {
          EXPECT_NEAR(bias[i], sums[i], (rounding + 8 * compute_epsilon()) * sizes[i]) << i;
        }
      }
    }
  }
}

TEST_P(KernelTest, GluValueAndBackward) {
  for (int kind = 0; kind <= static_cast<int>(GluKind::ClampedSwiGLU); ++kind) {
    for (const int64_t interleave : {0, 1, 6}) {
      const Glu glu{.kind = static_cast<GluKind>(kind), .interleave = interleave, .limit = 1.5};
      constexpr int64_t kRows = 3, kWidth = 78;
      Array x = random(2 * kRows * kWidth), g = random(kRows * kWidth);
      Array y(dtype, kRows * kWidth), expected(dtype, 2 * kRows * kWidth);
      Array grad(dtype, 2 * kRows * kWidth);
      on(glu_forward)(glu, dtype, x.data(), y.data(), kRows, kWidth);
      on(glu_backward)(glu, dtype, g.data(), x.data(), expected.data(), kRows, kWidth);
      for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 48}, {48, 30}}) {
        Array buffer(dtype, kRows * n);
        for (int64_t i = 0; i < kRows * n; ++i) buffer.set(i, g[i / n * kWidth + first + i % n]);
        on(glu_value_and_backward)(glu, dtype, buffer.data(), x.data(), grad.data(), kRows, n,
                                   kWidth, first);
        for (int64_t i = 0; i < kRows * n; ++i) {
          const double want = y[i / n * kWidth + first + i % n];
          expect_near(buffer[i], want, 4 * (1 + std::abs(want)), "y", i);
        }
      }
      for (int64_t i = 0; i < 2 * kRows * kWidth; ++i) {
        expect_near(grad[i], expected[i], 4 * (1 + std::abs(expected[i])), "grad_x", i);
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
