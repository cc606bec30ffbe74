#include <set>

#include "norm_test.h"

namespace transformer_ops::cuda {
namespace {

class NormBackwardTest : public NormTest {
 protected:
  // A call and its memory.
  struct Problem {
    Norm norm;
    int64_t rows, h;
    Array x, grad_y, gamma, mean, rstd, grad_x, grad_gamma, grad_beta, partials;
    bool scaled = norm != Norm::L2, centered = norm == Norm::LayerNorm;
    double gamma_add = 0;
    NormBackward call;
  };

  Problem problem(Norm norm, int64_t rows, int64_t h) {
    const bool scaled = norm != Norm::L2, centered = norm == Norm::LayerNorm;
    const int64_t parts = norm_backward_parts(rows, h), wanted = centered ? 2 : scaled ? 1 : 0;
    Problem p{.norm = norm,
              .rows = rows,
              .h = h,
              .x = random(rows * h),
              .grad_y = random(rows * h),
              .gamma = random(other, h),
              .mean = make(acc, rows),
              .rstd = make(acc, rows),
              .grad_x = make(rows * h),
              .grad_gamma = make(other, h),
              .grad_beta = make(dtype, h),
              .partials = make(acc, parts * wanted * h),
              .call = {}};
    const std::vector<double> in = p.x.values();
    for (int64_t r = 0; r < rows; ++r) {
      const auto s = statistics(norm, &in[r * h], h, 1e-2);
      p.mean.set(r, s.mean);
      p.rstd.set(r, s.rstd);
    }
    p.call = {.norm = norm,
              .dtype = dtype,
              .grad_y = p.grad_y.data(),
              .x = p.x.data(),
              .mean = centered ? p.mean.data() : nullptr,
              .rstd = p.rstd.data(),
              .residual_dtype = dtype,
              .grad_x = p.grad_x.data(),
              .parts = parts,
              .rows = rows,
              .h = h};
    if (scaled) {
      p.gamma_add = 1.0;
      p.call.gamma = p.gamma.vector(p.gamma_add);
      p.call.grad_gamma = p.grad_gamma.gradient();
    }
    if (centered) p.call.grad_beta = p.grad_beta.gradient();
    if (wanted > 0) p.call.partials = p.partials.data();
    return p;
  }

  // Against the formulas; `residual` has been added.
  void expect_right(const Problem& p, const Array* residual = nullptr) {
    const auto [x, grad_y, mean, rstd] =
        std::tuple(p.x.values(), p.grad_y.values(), p.mean.values(), p.rstd.values());
    std::vector<double> gamma_sums(p.h), beta_sums(p.h), gamma_sizes(p.h), beta_sizes(p.h);
    std::vector<double> weight(p.h, 1.0);
    for (int64_t i = 0; p.scaled && i < p.h; ++i) weight[i] = p.gamma[i] + p.gamma_add;
    for (int64_t r = 0; r < p.rows; ++r) {
      const double s = rstd[r], m = p.centered ? mean[r] : 0;
      double sum_g = 0, sum_gn = 0, size = 1;
      for (int64_t i = 0; i < p.h; ++i) {
        const int64_t at = r * p.h + i;
        const double g = grad_y[at], n = (x[at] - m) * s;
        sum_g += p.centered ? g * weight[i] : 0;
        sum_gn += g * weight[i] * n;
        size = std::max(size, std::abs(g * weight[i]) * (1 + std::abs(n)));
        gamma_sums[i] += g * n;
        gamma_sizes[i] += std::abs(g) * (1 + std::abs(n));
        beta_sums[i] += g;
        beta_sizes[i] += std::abs(g);
      }
      const double divisor = p.norm == Norm::L2 ? 1 : static_cast<double>(p.h);
      for (int64_t i = 0; i < p.h; ++i) {
        const int64_t at = r * p.h + i;
        const double n = (x[at] - m) * s;
        double want = (grad_y[at] * weight[i] - sum_g / divisor - n * sum_gn / divisor) * s;
        if (residual != nullptr) want += (*residual)[at];
        expect_value(p.grad_x, at, want, size * (1 + s) * (1 + std::abs(n)), "grad_x");
      }
    }
    for (int64_t i = 0; i < p.h; ++i) {
      if (p.call.grad_gamma.data != nullptr) {
        expect_value(p.grad_gamma, i, gamma_sums[i], gamma_sizes[i], "grad_gamma");
      }
      if (p.call.grad_beta.data != nullptr) {
        expect_value(p.grad_beta, i, beta_sums[i], beta_sizes[i], "grad_beta");
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Norms, NormBackwardTest, testing::ValuesIn(cases()), case_name);

struct Shape {
  int64_t rows, h;
};
// One row, fewer rows than blocks, and more than have places on their way; rows within a warp, and
// of several.
constexpr Shape kShapes[] = {{1, 1}, {5, 8}, {300, 24}, {2, 100}, {70, 1000}, {70, 2056}};

TEST_P(NormBackwardTest, Gradients) {
  for (const auto [rows, h] : kShapes) {
    for (const Norm norm : kNorms) {
      const Problem p = problem(norm, rows, h);
      norm_backward(nullptr, p.call);
      expect_right(p);
    }
  }
}

// Residuals have x's own type, or acc type. An output may overwrite any input of its type.
TEST_P(NormBackwardTest, ResidualsAndOutputsInPlace) {
  for (const auto [rows, h] : {Shape{7, 100}, Shape{13, 520}}) {
    for (const Norm norm : kNorms) {
      for (const DType type : std::set{dtype, acc}) {
        Problem p = problem(norm, rows, h);
        const Array residual = random(type, rows * h), sum = make(type, rows * h);
        p.call.residual = residual.data();
        p.call.residual_dtype = type;
        p.call.grad_x = sum.data();
        norm_backward(nullptr, p.call);
        Problem seen{.norm = norm,
                     .rows = rows,
                     .h = h,
                     .x = p.x,
                     .grad_y = p.grad_y,
                     .gamma = p.gamma,
                     .mean = p.mean,
                     .rstd = p.rstd,
                     .grad_x = sum,
                     .grad_gamma = p.grad_gamma,
                     .grad_beta = p.grad_beta,
                     .partials = p.partials,
                     .gamma_add = p.gamma_add,
                     .call = p.call};
        expect_right(seen, &residual);
        // Over the residual; then without one, where no other type is needed.
        p.call.grad_x = residual.data();
        norm_backward(nullptr, p.call);
        EXPECT_TRUE(residual == sum);
        if (type != dtype) continue;
        p.call.residual = nullptr;
        p.call.grad_x = sum.data();
        norm_backward(nullptr, p.call);
        p.call.grad_x = p.grad_y.data();
        const Array grad_y(p.grad_y);
        norm_backward(nullptr, p.call);
        EXPECT_TRUE(p.grad_y == sum) << "over grad_y";
        p.call.grad_y = grad_y.data();
        p.call.grad_x = p.x.data();
        norm_backward(nullptr, p.call);
        EXPECT_TRUE(p.x == sum) << "over x";
      }
    }
  }
}

TEST_P(NormBackwardTest, GradientsThatAreNotWanted) {
  const int64_t rows = 9, h = 136;
  Problem p = problem(Norm::LayerNorm, rows, h);
  norm_backward(nullptr, p.call);
  const Array grad_x(p.grad_x), grad_gamma(p.grad_gamma), grad_beta(p.grad_beta);
  const Array untouched = make(other, h);
  for (int wanted = 0; wanted < 3; ++wanted) {
    std::memset(p.grad_gamma.data(), 0xff, h * cpu::format(other).bytes);
    std::memset(p.grad_beta.data(), 0xff, h * cpu::format(dtype).bytes);
    NormBackward call = p.call;
    if (wanted != 1) call.grad_gamma = {};
    if (wanted != 2) call.grad_beta = {};
    if (wanted == 0) {
      call.partials = nullptr;
      call.parts = 0;
    }
    norm_backward(nullptr, call);
    EXPECT_TRUE(p.grad_x == grad_x);
    EXPECT_TRUE(p.grad_gamma == (wanted == 1 ? grad_gamma : untouched));
    EXPECT_EQ(p.grad_beta == grad_beta, wanted == 2);
  }
}

// No rows: sums of nothing, and no other launch.
TEST_P(NormBackwardTest, NoRowsAndOddNumbers) {
  const int64_t h = 24;
  const Problem none = problem(Norm::LayerNorm, 0, h);
  norm_backward(nullptr, none.call);
  for (int64_t i = 0; i < h; ++i) {
    EXPECT_EQ(none.grad_gamma[i], 0);
    EXPECT_EQ(none.grad_beta[i], 0);
  }
  const Problem p = problem(Norm::RMSNorm, 3, h);
  p.grad_y.set(h + 2, cpu::kNan);
  norm_backward(nullptr, p.call);
  for (int64_t i = 0; i < h; ++i) {
    EXPECT_EQ(std::isnan(p.grad_gamma[i]), i == 2);
    EXPECT_TRUE(std::isnan(p.grad_x[h + i]));
    EXPECT_TRUE(std::isfinite(p.grad_x[i]));
    EXPECT_TRUE(std::isfinite(p.grad_x[2 * h + i]));
  }
}

// Rows that take all threads of a block, and rows that do not fit.
TEST_P(NormBackwardTest, LongRows) {
  const int64_t rows = 2, most = dtype == DType::Float64 ? 8192 : 16384, h = most + 24;
  for (const auto& [norm, width] : {std::pair(Norm::RMSNorm, most), std::pair(Norm::L2, h)}) {
    const Problem p = problem(norm, rows, width);
    norm_backward(nullptr, p.call);
    expect_right(p);
  }
  Problem p = problem(Norm::LayerNorm, rows, h);
  const Array residual = random(acc, rows * h), sum = make(acc, rows * h);
  norm_backward(nullptr, p.call);
  expect_right(p);
  const Array grad_x(p.grad_x);
  p.call.residual = residual.data();
  p.call.residual_dtype = acc;
  p.call.grad_x = sum.data();
  norm_backward(nullptr, p.call);
  for (int64_t i = 0; i < rows * h; ++i) {
    const double own = cpu::format(dtype).epsilon() * std::abs(grad_x[i]);
    ASSERT_NEAR(sum[i] - residual[i], grad_x[i], own + 1e-6 * (1 + std::abs(residual[i])));
  }
  p.call.residual = nullptr;
  p.call.residual_dtype = dtype;
  p.call.grad_x = p.x.data();
  norm_backward(nullptr, p.call);
  EXPECT_TRUE(p.x == grad_x) << "over x";
}

// The sums are added in an order of their own: the same bits each time.
TEST_P(NormBackwardTest, SameBitsEachTime) {
  const Problem p = problem(Norm::LayerNorm, 200, 264);
  norm_backward(nullptr, p.call);
  const Array grad_gamma(p.grad_gamma), grad_beta(p.grad_beta), grad_x(p.grad_x);
  norm_backward(nullptr, p.call);
  EXPECT_TRUE(p.grad_gamma == grad_gamma);
  EXPECT_TRUE(p.grad_beta == grad_beta);
  EXPECT_TRUE(p.grad_x == grad_x);
}

}  // namespace
}  // namespace transformer_ops::cuda
