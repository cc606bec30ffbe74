#include "kernel_test.h"
#include "kernels/norm.h"

namespace transformer_ops::cpu {
namespace {

TEST_P(KernelTest, LayerNorm) {
  for (const auto [rows, h] : kRowShapes) {
    for (int present = 0; present < 4; ++present) {
      Array x = random(rows * h), g = random(rows * h), gamma = random_acc(h, 1.0);
      Array beta = random_acc(h), y(dtype, rows * h), grad(dtype, rows * h);
      Array mean(acc, rows), rstd(acc, rows), grad_gamma(acc, h, 0.5), grad_beta(acc, h, 0.25);
      void* gamma_data = (present & 1) != 0 ? gamma.data() : nullptr;
      void* beta_data = (present & 2) != 0 ? beta.data() : nullptr;
      on(layer_norm_forward)(dtype, x.data(), gamma_data, beta_data, 1e-3, y.data(), mean.data(),
                             rstd.data(), rows, h);
      on(layer_norm_backward)(dtype, g.data(), x.data(), mean.data(), rstd.data(), gamma_data,
                              grad.data(), grad_gamma.data(), grad_beta.data(), rows, h);
      std::vector<double> sum_gamma(h, 0.5), sum_beta(h, 0.25), size(h, 1.0);
      for (int64_t r = 0; r < rows; ++r) {
        double m = 0, v = 0, sum_g = 0, sum_gn = 0;
        for (int64_t i = 0; i < h; ++i) m += x[r * h + i] / h;
        for (int64_t i = 0; i < h; ++i) v += std::pow(x[r * h + i] - m, 2) / h;
        const double s = 1 / std::sqrt(v + 1e-3);
        EXPECT_NEAR(mean[r], m, 40 * compute_epsilon());
        EXPECT_NEAR(rstd[r], s, 40 * compute_epsilon() * s);
        const auto weight = [&](int64_t i) { return gamma_data != nullptr ? gamma[i] : 1.0; };
        for (int64_t i = 0; i < h; ++i) {
          const double n = (x[r * h + i] - m) * s, gy = g[r * h + i];
          sum_g += gy * weight(i) / h;
          sum_gn += gy * weight(i) * n / h;
          sum_gamma[i] += gy * n;
          sum_beta[i] += gy;
          size[i] += std::abs(gy) * (1 + std::abs(n));
          const double expected = n * weight(i) + (beta_data != nullptr ? beta[i] : 0.0);
          expect_near(y[r * h + i], expected, 40 * (1 + s) * (1 + std::abs(weight(i))), "y", i);
        }
        for (int64_t i = 0; i < h; ++i) {
          const double n = (x[r * h + i] - m) * s;
          const double expected = s * (g[r * h + i] * weight(i) - sum_g - n * sum_gn);
          expect_near(grad[r * h + i], expected, 400 * s * (1 + s), "grad_x", i);
        }
      }
      for (int64_t i = 0; i < h; ++i) {
        EXPECT_NEAR(grad_gamma[i], sum_gamma[i], 40 * compute_epsilon() * size[i]) << i;
        EXPECT_NEAR(grad_beta[i], sum_beta[i], 40 * compute_epsilon() * size[i]) << i;
      }
    }
  }
}

TEST_P(KernelTest, RootMeanSquareAndL2Norms) {
  for (const auto [rows, h] : kRowShapes) {
    for (int variant = 0; variant < 3; ++variant) {  // RMS with gamma, RMS without, L2
      const bool l2 = variant == 2, has_gamma = variant == 0;
      const double divisor = l2 ? 1.0 : static_cast<double>(h);
      Array x = random(rows * h), g = random(rows * h), gamma = random_acc(h, 1.0);
      Array y(dtype, rows * h), grad(dtype, rows * h), rstd(acc, rows), grad_gamma(acc, h, 0.5);
      void* gamma_data = has_gamma ? gamma.data() : nullptr;
      if (l2) {
        on(l2_norm_forward)(dtype, x.data(), 1e-3, y.data(), rstd.data(), rows, h);
        on(l2_norm_backward)(dtype, g.data(), x.data(), rstd.data(), grad.data(), rows, h);
      } else {
        on(rms_norm_forward)(dtype, x.data(), gamma_data, 1e-3, y.data(), rstd.data(), rows, h);
        on(rms_norm_backward)(dtype, g.data(), x.data(), rstd.data(), gamma_data, grad.data(),
                              has_gamma ? grad_gamma.data() : nullptr, rows, h);
      }
      std::vector<double> sum_gamma(h, 0.5), size(h, 1.0);
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0, projection = 0;
        for (int64_t i = 0; i < h; ++i) squares += std::pow(x[r * h + i], 2);
        const double s = 1 / std::sqrt(squares / divisor + 1e-3);
        EXPECT_NEAR(rstd[r], s, 10 * compute_epsilon() * s);
        const auto weight = [&](int64_t i) { return has_gamma ? gamma[i] : 1.0; };
        for (int64_t i = 0; i < h; ++i) {
          const double n = x[r * h + i] * s, gy = g[r * h + i];
          projection += gy * weight(i) * n / divisor;
          sum_gamma[i] += gy * n;
          size[i] += std::abs(gy * n);
          expect_near(y[r * h + i], n * weight(i), 10 * std::abs(n * weight(i)), "y", i);
        }
        for (int64_t i = 0; i < h; ++i) {
          const double expected = s * (g[r * h + i] * weight(i) - x[r * h + i] * s * projection);
          expect_near(grad[r * h + i], expected, 400 * s * (1 + s), "grad_x", i);
        }
      }
      for (int64_t i = 0; i < h && has_gamma; ++i) {
        EXPECT_NEAR(grad_gamma[i], sum_gamma[i], 40 * compute_epsilon() * size[i]) << i;
      }
    }
  }
}

TEST_P(KernelTest, NormsInPlace) {
  const int64_t rows = 3, h = 700;
  Array x = random(rows * h), g = random(rows * h), y(dtype, rows * h), grad(dtype, rows * h);
  Array gamma = random_acc(h), rstd(acc, rows), mean(acc, rows), grad_gamma(acc, h);
  on(layer_norm_forward)(dtype, x.data(), gamma.data(), nullptr, 1e-5, y.data(), mean.data(),
                         rstd.data(), rows, h);
  on(layer_norm_backward)(dtype, g.data(), x.data(), mean.data(), rstd.data(), gamma.data(),
                          grad.data(), grad_gamma.data(), nullptr, rows, h);
  on(layer_norm_backward)(dtype, g.data(), x.data(), mean.data(), rstd.data(), gamma.data(),
                          g.data(), nullptr, nullptr, rows, h);
  on(layer_norm_forward)(dtype, x.data(), gamma.data(), nullptr, 1e-5, x.data(), mean.data(),
                         rstd.data(), rows, h);
  for (int64_t i = 0; i < rows * h; ++i) {
    EXPECT_EQ(x[i], y[i]);
    EXPECT_EQ(g[i], grad[i]);
  }
}

TEST_P(KernelTest, LongRowsStayAccurate) {
  const int64_t h = 1 << 20;
  Array x = random(h, 1.0), y(dtype, h), mean(acc, 1), rstd(acc, 1);
  double m = 0, v = 0;
  for (int64_t i = 0; i < h; ++i) {
    x.set(i, x[i] + 10.0);
    m += x[i];
  }
  m /= h;
  for (int64_t i = 0; i < h; ++i) v += (x[i] - m) * (x[i] - m) / h;
  on(layer_norm_forward)(dtype, x.data(), nullptr, nullptr, 0.0, y.data(), mean.data(), rstd.data(),
                         1, h);
  EXPECT_NEAR(mean[0], m, 2 * compute_epsilon() * m);
  EXPECT_NEAR(rstd[0], 1 / std::sqrt(v), 8 * compute_epsilon() / std::sqrt(v));
}

TEST_P(KernelTest, NormsPassNan) {
  Array x(dtype, 40, 1.0), y(dtype, 40), mean(acc, 2), rstd(acc, 2);
  x.set(3, kNan);
  on(layer_norm_forward)(dtype, x.data(), nullptr, nullptr, 1e-5, y.data(), mean.data(),
                         rstd.data(), 2, 20);
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(y[i]), i < 20) << i;
  on(rms_norm_forward)(dtype, x.data(), nullptr, 1e-5, y.data(), rstd.data(), 2, 20);
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(y[i]), i < 20) << i;
}

TEST_P(KernelTest, ZeroRowWithoutEps) {
  Array x(dtype, 16, 0.0), y(dtype, 16), rstd(acc, 1);
  on(l2_norm_forward)(dtype, x.data(), 0.0, y.data(), rstd.data(), 1, 16);
  EXPECT_EQ(rstd[0], kInf);
  EXPECT_TRUE(std::isnan(y[0]));
}

}  // namespace
}  // namespace transformer_ops::cpu
