#include "../cpp/kernels/formulas.h"
#include "device_test.h"
#include "kernels/bias.h"
#include "kernels/glu.h"

namespace transformer_ops::cuda {
namespace {

using kernel::Real;

class GluTest : public DeviceTest {
 protected:
  struct Halves {
    int64_t gate, linear;  // elements of x for one of y
  };
  static Halves halves(const Glu& glu, int64_t i, int64_t h) {
    const int64_t block = glu.interleave == 0 ? h : glu.interleave;
    const int64_t row = i / h, column = i % h;
    const int64_t gate = row * 2 * h + column / block * 2 * block + column % block;
    return {gate, gate + block};
  }

  void expect_forward(const Glu& glu, const Buffer& x, const Buffer& y, int64_t rows, int64_t h) {
    for (int64_t i = 0; i < rows * h; ++i) {
      const auto [gate, linear] = halves(glu, i, h);
      const Real a = x[gate], b = x[linear];
      const auto expected = static_cast<double>(kernel::glu(glu, a, b));
      const auto size = static_cast<double>((1 + std::abs(a)) * (1 + std::abs(b)));
      expect_near(dtype, y[i], expected, size + 2 * std::abs(expected), "y", i);
    }
  }

  void expect_backward(const Glu& glu, const Buffer& g, const Buffer& x, const Buffer& grad_x,
                       int64_t rows, int64_t h) {
    for (int64_t i = 0; i < rows * h; ++i) {
      const auto [gate, linear] = halves(glu, i, h);
      const Real a = x[gate], b = x[linear];
      if (std::abs(a) < 1e-4L) continue;  // the kink
      const double by_a = kernel::derivative([&](Real v) { return kernel::glu(glu, v, b); }, a);
      const double by_b = kernel::derivative([&](Real v) { return kernel::glu(glu, a, v); }, b);
      const auto size =
          static_cast<double>((1 + std::abs(a)) * (1 + std::abs(b))) * std::abs(g[i]) * 4;
      expect_near(dtype, grad_x[gate], g[i] * by_a, size, "gate", i);
      expect_near(dtype, grad_x[linear], g[i] * by_b, size, "linear", i);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, GluTest, testing::ValuesIn(cases()), case_name);

struct Shape {
  int64_t rows, h, interleave;
};
constexpr Shape kShapes[] = {{0, 8, 0},  {3, 0, 0}, {1, 1, 0},    {5, 7, 0},   {3, 48, 0},
                             {5, 48, 8}, {4, 6, 1}, {3, 144, 16}, {2, 20, 10}, {7, 2064, 0}};

std::vector<Glu> glus() {
  std::vector<Glu> all;
  for (int kind = 0; kind <= static_cast<int>(GluKind::ClampedSwiGLU); ++kind) {
    Glu glu;
    glu.kind = static_cast<GluKind>(kind);
    glu.beta1 = 3.0;
    glu.limit = 2.503;  // not a number of 16 bits: no input lies on the kink
    all.push_back(glu);
  }
  return all;
}

TEST_P(GluTest, ForwardAndBackward) {
  for (Glu glu : glus()) {
    for (const auto& [rows, h, interleave] : kShapes) {
      // The wide one for one kind only.
      if (h > 1000 && glu.kind != GluKind::SwiGLU) continue;
      glu.interleave = interleave;
      const Buffer x = random(rows * 2 * h), y = make(rows * h);
      const Buffer g = random(rows * h), grad_x = make(rows * 2 * h);
      glu_forward(nullptr, glu, dtype, x.data(), y.data(), rows, h);
      glu_backward(nullptr, glu, dtype, g.data(), x.data(), grad_x.data(), rows, h);
      expect_forward(glu, x, y, rows, h);
      expect_backward(glu, g, x, grad_x, rows, h);
      glu_backward(nullptr, glu, dtype, g.data(), x.data(), x.data(), rows, h);
      EXPECT_TRUE(x == grad_x) << "in place";
    }
  }
}

TEST_P(GluTest, AfterABias) {
  for (Glu glu : glus()) {
    for (const auto& [rows, h, interleave] : kShapes) {
      if (h > 1000) continue;
      glu.interleave = interleave;
      for (const DType bias_dtype : {dtype, other}) {
        const Buffer x = random(rows * 2 * h), kept = make(rows * 2 * h);
        const Buffer y = make(rows * h), alone = make(rows * h), of_kept = make(rows * h);
        const Buffer b = random(bias_dtype, 2 * h);
        const Vector bias{b.data(), bias_dtype, 0.25};
        bias_glu_forward(nullptr, glu, dtype, x.data(), bias, kept.data(), y.data(), rows, h);
        bias_glu_forward(nullptr, glu, dtype, x.data(), bias, nullptr, alone.data(), rows, h);
        glu_forward(nullptr, glu, dtype, kept.data(), of_kept.data(), rows, h);
        EXPECT_TRUE(y == of_kept) << "computed from what is kept";
        EXPECT_TRUE(y == alone);
        for (int64_t i = 0; i < rows * 2 * h; ++i) {
          const double sum = x[i] + (b[i % (2 * h)] + 0.25);
          expect_near(dtype, kept[i], sum, std::abs(x[i]) + 1 + std::abs(sum), "kept", i);
        }
        bias_glu_forward(nullptr, glu, dtype, x.data(), bias, x.data(), y.data(), rows, h);
        EXPECT_TRUE(x == kept) << "in place";
        EXPECT_TRUE(y == alone);
      }
    }
  }
}

TEST_P(GluTest, WithTheGradientOfABias) {
  for (Glu glu : glus()) {
    for (const auto& [rows, h, interleave] : kShapes) {
      if (h > 1000 && glu.kind != GluKind::SwiGLU) continue;
      glu.interleave = interleave;
      const Buffer x = random(rows * 2 * h), g = random(rows * h);
      const Buffer grad_x = make(rows * 2 * h), fused = make(rows * 2 * h);
      glu_backward(nullptr, glu, dtype, g.data(), x.data(), grad_x.data(), rows, h);
      for (const int64_t parts : {int64_t{1}, int64_t{3}}) {
        const Buffer sums = make(acc, 2 * h), partials = make(acc, parts * 2 * h);
        glu_bias_backward(nullptr, glu, dtype, g.data(), x.data(), fused.data(),
                          {{sums.data(), acc}, partials.data(), parts}, rows, h);
        EXPECT_TRUE(fused == grad_x);
        for (int64_t c = 0; c < 2 * h; ++c) {
          double sum = 0, size = 1;
          for (int64_t r = 0; r < rows; ++r) {
            sum += grad_x[r * 2 * h + c];
            size += std::abs(grad_x[r * 2 * h + c]);
          }
          // Sums are of what was not yet rounded.
          expect_near(acc, sums[c], sum, size * (1 + cpu::format(dtype).epsilon() / 5e-7), "sum",
                      c);
        }
      }
    }
  }
}

TEST_P(GluTest, InfinityAndNanPass) {
  const Buffer x = make(4), y = make(2);
  Glu glu;
  glu.kind = GluKind::SwiGLU;
  x.set(0, INFINITY);
  x.set(1, std::nan(""));
  x.set(2, 2.0);
  x.set(3, 1.0);
  glu_forward(nullptr, glu, dtype, x.data(), y.data(), 1, 2);
  EXPECT_EQ(y[0], INFINITY);
  EXPECT_TRUE(std::isnan(y[1]));
}

}  // namespace
}  // namespace transformer_ops::cuda
