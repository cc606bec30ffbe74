#include <functional>

#include "kernel_test.h"
#include "kernels/norm.h"

namespace transformer_ops::cpu {
namespace {

// One norm's backward, plain and with a residual, by where it writes grad_x.
struct Backward {
  std::function<void(void* grad_x)> plain;
  std::function<void(bool wide, void* residual, void* grad_x)> with_residual;
};

class NormResidual : public KernelTest {
 protected:
  // grad_x without a residual is known to be right: the tests of norms see to it.
  void check(const Backward& backward, int64_t n) {
    Array residual = random(n), wide_residual = random_acc(n), zeros(acc, n);
    Array plain(dtype, n), exact(acc, n), narrow(dtype, n), wide(acc, n);
    backward.plain(plain.data());
    backward.with_residual(true, zeros.data(), exact.data());
    backward.with_residual(false, residual.data(), narrow.data());
    backward.with_residual(true, wide_residual.data(), wide.data());
    for (int64_t i = 0; i < n; ++i) {
      const double slack = 4 * (std::abs(exact[i]) + 4);
      expect_near(plain[i], exact[i], slack, "plain", i);
      expect_near(narrow[i], exact[i] + residual[i], slack, "narrow", i);
      EXPECT_NEAR(wide[i], exact[i] + wide_residual[i], slack * compute_epsilon()) << i;
    }
    // In place of the residual.
    backward.with_residual(false, residual.data(), residual.data());
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(residual[i], narrow[i]) << i;
  }
};

TEST_P(NormResidual, LayerNorm) {
  for (const RowShape& shape : kRowShapes) {
    const int64_t rows = shape.rows, h = shape.h;
    for (const bool has_gamma : {false, true}) {
      Array x = random(rows * h), g = random(rows * h), gamma = random_acc(h, 1.0);
      Array y(dtype, rows * h), mean(acc, rows), rstd(acc, rows);
      Array grad_gamma(acc, h), grad_beta(acc, h), sum_gamma(acc, h), sum_beta(acc, h);
      void* weight = has_gamma ? gamma.data() : nullptr;
      on(layer_norm_forward)(dtype, x.data(), weight, nullptr, 1e-3, y.data(), mean.data(),
                             rstd.data(), rows, h);
      check({[&](void* grad_x) {
               on(layer_norm_backward)(dtype, g.data(), x.data(), mean.data(), rstd.data(), weight,
                                       grad_x, sum_gamma.data(), sum_beta.data(), rows, h);
             },
             [&](bool wide, void* residual, void* grad_x) {
               // The sums of the last of several calls; nobody wants those of wide ones.
               grad_gamma = Array(acc, h);
               grad_beta = Array(acc, h);
               on(layer_norm_residual_backward)(dtype, wide, g.data(), x.data(), mean.data(),
                                                rstd.data(), weight, residual, grad_x,
                                                wide ? nullptr : grad_gamma.data(),
                                                wide ? nullptr : grad_beta.data(), rows, h);
             }},
            rows * h);
      for (int64_t i = 0; i < h; ++i) {
        EXPECT_NEAR(grad_gamma[i], sum_gamma[i], 1e2 * compute_epsilon() * (rows + 1)) << i;
        EXPECT_NEAR(grad_beta[i], sum_beta[i], 1e2 * compute_epsilon() * (rows + 1)) << i;
      }
    }
  }
}

TEST_P(NormResidual, RMSNorm) {
  for (const RowShape& shape : kRowShapes) {
    const int64_t rows = shape.rows, h = shape.h;
    for (const bool has_gamma : {false, true}) {
      Array x = random(rows * h), g = random(rows * h), gamma = random_acc(h, 1.0);
      Array y(dtype, rows * h), rstd(acc, rows), grad_gamma(acc, h), sum_gamma(acc, h);
      void* weight = has_gamma ? gamma.data() : nullptr;
      on(rms_norm_forward)(dtype, x.data(), weight, 1e-3, y.data(), rstd.data(), rows, h);
      check({[&](void* grad_x) {
               on(rms_norm_backward)(dtype, g.data(), x.data(), rstd.data(), weight, grad_x,
                                     sum_gamma.data(), rows, h);
             },
             [&](bool wide, void* residual, void* grad_x) {
               grad_gamma = Array(acc, h);
               on(rms_norm_residual_backward)(dtype, wide, g.data(), x.data(), rstd.data(), weight,
                                              residual, grad_x, wide ? nullptr : grad_gamma.data(),
                                              rows, h);
             }},
            rows * h);
      for (int64_t i = 0; has_gamma && i < h; ++i) {
        EXPECT_NEAR(grad_gamma[i], sum_gamma[i], 1e2 * compute_epsilon() * (rows + 1)) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, NormResidual, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace transformer_ops::cpu
