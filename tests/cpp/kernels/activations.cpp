// Activations and gated linear units.
#include "formulas.h"
#include "kernel_test.h"
#include "kernels/activation.h"
#include "kernels/glu.h"

namespace transformer_ops::cpu {
namespace {

using kernel::activation;
using kernel::derivative;
using kernel::Real;
using kernel::sigmoid;

// ---- activations ----

TEST_P(KernelTest, Activations) {
  for (Activation a : kActivations) {
    const auto f = [a](Real x) { return activation(a, x); };
    for (int64_t n : kSizes) {
      Array x = random(n), g = random(n), y(dtype, n), grad(dtype, n);
      on(activation_forward)(a, dtype, x.data(), y.data(), n);
      on(activation_backward)(a, dtype, g.data(), x.data(), grad.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        const double expected = static_cast<double>(f(x[i]));
        expect_near(y[i], expected, 4 * std::abs(x[i]) + 4 * std::abs(expected), "forward", i);
        if (std::abs(x[i]) < 1e-4) continue;  // the kink
        const double slope = derivative(f, x[i]);
        expect_near(grad[i], g[i] * slope, 8 * std::abs(g[i]) * (1 + std::abs(slope)), "backward",
                    i);
      }
    }
  }
}

TEST_P(KernelTest, ActivationsInPlace) {
  for (Activation a : kActivations) {
    Array x = random(1001), y(dtype, 1001), g = random(1001), grad(dtype, 1001);
    on(activation_forward)(a, dtype, x.data(), y.data(), 1001);
    on(activation_backward)(a, dtype, g.data(), x.data(), grad.data(), 1001);
    on(activation_backward)(a, dtype, g.data(), x.data(), g.data(), 1001);
    on(activation_forward)(a, dtype, x.data(), x.data(), 1001);
    for (int64_t i = 0; i < 1001; ++i) {
      EXPECT_EQ(x[i], y[i]);
      EXPECT_EQ(g[i], grad[i]);
    }
  }
}

// Relative accuracy over the whole range. The argument of the exponential is rounded, so that its
// size counts; results below the normal range may be flushed.
TEST_P(KernelTest, ActivationsOnTheWholeRange) {
  if (dtype != DType::Float32) GTEST_SKIP() << "Float32 only";
  std::vector<double> values;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 50021) {
    const float x = __builtin_bit_cast(float, static_cast<uint32_t>(bits));
    if (std::isfinite(x)) values.push_back(x);
  }
  const auto n = static_cast<int64_t>(values.size());
  Array x(dtype, values), y(dtype, n), g(dtype, n, 1.0), grad(dtype, n);
  for (Activation a : kActivations) {
    on(activation_forward)(a, dtype, x.data(), y.data(), n);
    on(activation_backward)(a, dtype, g.data(), x.data(), grad.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      // The plain formula of GELU cancels in the negative tail.
      const Real u = 1.59576912160573071176L * (x[i] + 0.044715L * x[i] * x[i] * x[i]);
      const Real exact = a == Activation::GELU ? x[i] * sigmoid(u) : activation(a, x[i]);
      const double expected = static_cast<float>(exact);
      if (std::isinf(expected)) {
        EXPECT_EQ(y[i], expected) << x[i];
        continue;
      }
      const bool exponential = a != Activation::ReLU && a != Activation::SReLU && x[i] < 0;
      const double argument = a == Activation::GELU        ? static_cast<double>(u)
                              : a == Activation::ExactGELU ? x[i] * x[i] / 2
                                                           : 1.702 * x[i];
      const double ulps = exponential ? 4 + 4 * std::abs(argument) : 4;
      const double flushed = std::abs(x[i]) * 1.2e-38 + 1.2e-38;
      ASSERT_LE(std::abs(y[i] - expected), ulps * 6e-8 * std::abs(expected) + flushed)
          << static_cast<int>(a) << " x " << x[i] << " y " << y[i] << " want " << expected;
      ASSERT_FALSE(std::isnan(grad[i])) << static_cast<int>(a) << " x " << x[i];
    }
  }
}

// exp and tanh, seen through the gated units that they make up: a sigmoid, and two tangents.
TEST_P(KernelTest, ExponentialsAreAccurate) {
  if (dtype != DType::Float32) GTEST_SKIP() << "Float32 only";
  Glu sigmoid_unit, tanh_unit;
  sigmoid_unit.kind = GluKind::GLU;
  tanh_unit.kind = GluKind::SiTUGLU;
  tanh_unit.beta1 = tanh_unit.beta2 = 1;
  double worst_sigmoid = 0, worst_tanh = 0;
  const auto ulps = [](double actual, Real exact) {
    const int exponent = std::max(std::ilogb(static_cast<double>(exact)), -126);
    return std::abs(static_cast<double>(actual - exact)) / std::ldexp(1.0, exponent - 23);
  };
  std::vector<double> gates;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 30011) {
    const float x = __builtin_bit_cast(float, static_cast<uint32_t>(bits));
    if (std::isnan(x)) continue;
    gates.push_back(x);
  }
  const auto n = static_cast<int64_t>(gates.size());
  // For the sigmoid x and 1; for tanh a large gate, where its own factors are 1, and x.
  std::vector<double> sigmoid_input = gates, tanh_input(gates.size(), 30.0);
  sigmoid_input.resize(2 * gates.size(), 1.0);
  tanh_input.insert(tanh_input.end(), gates.begin(), gates.end());
  Array in(dtype, sigmoid_input), tanh_in(dtype, tanh_input), y(dtype, n), tanh_y(dtype, n);
  on(glu_forward)(sigmoid_unit, dtype, in.data(), y.data(), 1, n);
  on(glu_forward)(tanh_unit, dtype, tanh_in.data(), tanh_y.data(), 1, n);
  for (int64_t i = 0; i < n; ++i) {
    const Real exact = sigmoid(in[i]), exact_tanh = std::tanh(Real{in[i]});
    worst_tanh = std::max(worst_tanh, ulps(tanh_y[i], exact_tanh));
    if (exact < std::numeric_limits<float>::min()) {
      ASSERT_LE(y[i], 2 * std::numeric_limits<float>::min()) << in[i];
    } else {
      worst_sigmoid = std::max(worst_sigmoid, ulps(y[i], exact));
    }
  }
  EXPECT_LE(worst_sigmoid, 3);
  EXPECT_LE(worst_tanh, 3);
}

TEST_P(KernelTest, ActivationsOfNanAndInfinity) {
  struct Row {
    Activation activation;
    double y[3], grad[3];  // of NaN, inf, -inf, as PyTorch's formulas give with grad_y = 1
  };
  const Row rows[] = {
      {Activation::GELU, {kNan, kInf, kNan}, {kNan, kNan, kNan}},
      {Activation::ExactGELU, {kNan, kInf, kNan}, {kNan, kNan, kNan}},
      {Activation::QGELU, {kNan, kInf, kNan}, {kNan, kNan, kNan}},
      {Activation::ReLU, {kNan, kInf, 0}, {1, 1, 0}},
      {Activation::SReLU, {kNan, kInf, 0}, {kNan, kInf, 0}},
      {Activation::SiLU, {kNan, kInf, kNan}, {kNan, kNan, kNan}},
  };
  const double specials[] = {kNan, kInf, -kInf};
  for (const Row& row : rows) {
    Array x(dtype, 60), y(dtype, 60), g(dtype, 60, 1.0), grad(dtype, 60);
    for (int64_t i = 0; i < 60; ++i) x.set(i, specials[i % 3]);
    on(activation_forward)(row.activation, dtype, x.data(), y.data(), 60);
    on(activation_backward)(row.activation, dtype, g.data(), x.data(), grad.data(), 60);
    for (int64_t i = 0; i < 60; ++i) {
      expect_near(y[i], row.y[i % 3], 0, "forward", i);
      expect_near(grad[i], row.grad[i % 3], 0, "backward", i);
    }
  }
}

TEST_P(KernelTest, ReluKeepsABitMask) {
  for (int64_t n : kSizes) {
    Array x = random(n), g = random(n), y(dtype, n), grad(dtype, n);
    if (n > 3) x.set(3, kNan);
    if (n > 5) x.set(5, 0.0);
    std::vector<uint8_t> mask((n + 7) / 8, 0xff);
    on(relu_forward)(dtype, x.data(), y.data(), mask.data(), n);
    on(relu_backward)(dtype, g.data(), mask.data(), grad.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const bool passes = !(x[i] <= 0);
      EXPECT_EQ((mask[i / 8] >> (i % 8)) & 1, passes) << i;
      expect_near(y[i], passes ? x[i] : 0.0, 0, "forward", i);
      EXPECT_EQ(grad[i], passes ? g[i] : 0.0) << i;
    }
    if (n % 8 != 0) {
      EXPECT_EQ(mask.back() >> (n % 8), 0);
    }
  }
}

TEST_P(KernelTest, BackwardFromOutput) {
  for (int64_t n : kSizes) {
    Array y = random(n), g = random(n), grad(dtype, n);
    for (int64_t i = 0; i < n; ++i) y.set(i, std::max(y[i], 0.0));
    on(activation_backward_from_output)(Activation::ReLU, dtype, g.data(), y.data(), grad.data(),
                                        n);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(grad[i], y[i] > 0 ? g[i] : 0.0);
    on(activation_backward_from_output)(Activation::SReLU, dtype, g.data(), y.data(), grad.data(),
                                        n);
    for (int64_t i = 0; i < n; ++i) {
      const double expected = g[i] * 2 * std::sqrt(y[i]);
      expect_near(grad[i], expected, 4 * std::abs(expected), "from output", i);
    }
  }
}

// ---- gated linear units ----

TEST_P(KernelTest, GatedLinearUnits) {
  struct Shape {
    int64_t rows, h, interleave;
  };
  const Shape shapes[] = {{0, 8, 0},      {3, 0, 0}, {1, 1, 0},      {5, 1, 1},   {4, 7, 0},
                          {3, 12, 2},     {3, 6, 3}, {2, 64, 32},    {2, 513, 0}, {1, 1200, 0},
                          {2, 1200, 600}, {7, 8, 1}, {1, 4096, 1024}};
  for (int kind = 0; kind <= static_cast<int>(GluKind::ClampedSwiGLU); ++kind) {
    for (const Shape& shape : shapes) {
      Glu options;
      options.kind = static_cast<GluKind>(kind);
      options.interleave = shape.interleave;
      options.limit = 2.5;
      const int64_t h = shape.h, block = shape.interleave == 0 ? h : shape.interleave;
      Array x = random(shape.rows * 2 * h), g = random(shape.rows * h);
      Array y(dtype, g.size()), grad(dtype, x.size());
      on(glu_forward)(options, dtype, x.data(), y.data(), shape.rows, h);
      on(glu_backward)(options, dtype, g.data(), x.data(), grad.data(), shape.rows, h);
      for (int64_t i = 0; i < g.size(); ++i) {
        const int64_t column = i % h;
        const int64_t gate = i / h * 2 * h + column / block * 2 * block + column % block;
        const double a = x[gate], b = x[gate + block];
        const auto expected = static_cast<double>(glu(options, a, b));
        const double size = (1 + std::abs(a)) * (1 + std::abs(a)) * (1 + std::abs(b));
        expect_near(y[i], expected, 8 * size, "forward", i);
        const auto near = [](double v, double kink) { return std::abs(v - kink) < 1e-4; };
        if (near(a, 0) || near(a, 2.5) || near(b, 2.5) || near(b, -2.5)) continue;
        const double slope_a = derivative([&](Real v) { return glu(options, v, b); }, a);
        const double slope_b = derivative([&](Real v) { return glu(options, a, v); }, b);
        const double slack = 16 * size * (1 + std::abs(g[i]));
        expect_near(grad[gate], g[i] * slope_a, slack, "gate", i);
        expect_near(grad[gate + block], g[i] * slope_b, slack, "linear", i);
      }
    }
  }
}

TEST_P(KernelTest, ClampedGradientPassesAtTheLimit) {
  Glu options;
  options.kind = GluKind::ClampedSwiGLU;
  options.limit = 2.0;
  Array x(dtype, {2.0, 2.0}), above(dtype, {2.5, -2.5}), g(dtype, 1, 1.0), grad(dtype, 2);
  on(glu_backward)(options, dtype, g.data(), x.data(), grad.data(), 1, 1);
  EXPECT_NE(grad[0], 0.0);
  EXPECT_NE(grad[1], 0.0);
  on(glu_backward)(options, dtype, g.data(), above.data(), grad.data(), 1, 1);
  EXPECT_EQ(grad[0], 0.0);
  EXPECT_EQ(grad[1], 0.0);
}

TEST_P(KernelTest, ReGluBlocksInfinityBehindAClosedGate) {
  Glu options;
  options.kind = GluKind::ReGLU;
  Array x(dtype, {-1.0, kInf}), g(dtype, 1, 1.0), grad(dtype, 2);
  on(glu_backward)(options, dtype, g.data(), x.data(), grad.data(), 1, 1);
  EXPECT_EQ(grad[0], 0.0);
  EXPECT_EQ(grad[1], 0.0);
}

}  // namespace
}  // namespace transformer_ops::cpu
