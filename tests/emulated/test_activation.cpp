#include "../cpp/kernels/formulas.h"
#include "device_test.h"
#include "kernels/activation.h"

namespace transformer_ops::cuda {
namespace {

using kernel::Real;

class ActivationTest : public DeviceTest {};
INSTANTIATE_TEST_SUITE_P(Cuda, ActivationTest, testing::ValuesIn(cases()), case_name);

constexpr Activation kActivations[] = {Activation::GELU, Activation::ExactGELU, Activation::QGELU,
                                       Activation::ReLU, Activation::SReLU,     Activation::SiLU};
// The last one takes several blocks.
constexpr int64_t kSizes[] = {0, 1, 7, 8, 33, 8192 + 13};

TEST_P(ActivationTest, Activations) {
  for (const Activation a : kActivations) {
    const auto f = [a](Real x) { return kernel::activation(a, x); };
    for (const int64_t n : kSizes) {
      const Buffer x = random(n), g = random(n), y = make(n), grad = make(n);
      activation_forward(nullptr, a, dtype, x.data(), y.data(), n);
      activation_backward(nullptr, a, dtype, g.data(), x.data(), grad.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        const auto expected = static_cast<double>(f(x[i]));
        expect_near(dtype, y[i], expected, std::abs(x[i]) + std::abs(expected), "forward", i);
        if (std::abs(x[i]) < 1e-4) continue;  // the kink
        const double slope = kernel::derivative(f, x[i]);
        expect_near(dtype, grad[i], g[i] * slope, std::abs(g[i]) * (1 + std::abs(slope)),
                    "backward", i);
      }
    }
  }
}

TEST_P(ActivationTest, ActivationsInPlaceAndFromTheOutput) {
  const int64_t n = 1001;
  for (const Activation a : kActivations) {
    const Buffer x = random(n), g = random(n), y = make(n), grad = make(n);
    activation_forward(nullptr, a, dtype, x.data(), y.data(), n);
    activation_backward(nullptr, a, dtype, g.data(), x.data(), grad.data(), n);
    const Buffer over_x(x), over_g(g);
    activation_forward(nullptr, a, dtype, over_x.data(), over_x.data(), n);
    activation_backward(nullptr, a, dtype, over_g.data(), x.data(), over_g.data(), n);
    EXPECT_TRUE(over_x == y);
    EXPECT_TRUE(over_g == grad);
    if (a != Activation::ReLU && a != Activation::SReLU) continue;
    const Buffer from_output = make(n);
    activation_backward_from_output(nullptr, a, dtype, g.data(), y.data(), from_output.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double slope = y[i] <= 0 ? 0 : a == Activation::ReLU ? 1 : 2 * std::sqrt(y[i]);
      expect_near(dtype, from_output[i], g[i] * slope, std::abs(g[i] * slope), "from output", i);
    }
  }
}

// All of a 16-bit dtype; and what a float32 tail is like: relative to the result, not to x.
TEST_P(ActivationTest, ActivationsOnTheWholeRange) {
  std::vector<double> values;
  for (uint32_t bits = 0; bits < 0x10000; bits += GetParam().shift == 0 ? 1 : 37) {
    const DType from = cpu::format(dtype).bytes == 2 ? dtype : DType::BFloat16;
    values.push_back(cpu::decode16(static_cast<uint16_t>(bits), from));
  }
  const auto n = static_cast<int64_t>(values.size());
  const Buffer x = make(n), y = make(n);
  for (int64_t i = 0; i < n; ++i) x.set(i, values[i]);
  for (const Activation a : kActivations) {
    activation_forward(nullptr, a, dtype, x.data(), y.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(x[i])) {
        EXPECT_TRUE(std::isnan(y[i])) << "NaN must pass";
        continue;
      }
      // The plain formula of GELU cancels in the negative tail.
      const Real u = 1.59576912160573071176L * (x[i] + 0.044715L * x[i] * x[i] * x[i]);
      const Real exact =
          a == Activation::GELU ? x[i] * kernel::sigmoid(u) : kernel::activation(a, x[i]);
      const double expected = static_cast<double>(exact);
      const double argument = a == Activation::GELU        ? static_cast<double>(u)
                              : a == Activation::ExactGELU ? x[i] * x[i] / 2
                                                           : 1.702 * x[i];
      const double relative = std::isfinite(argument) ? 1 + std::min(std::abs(argument), 1e3) : 0;
      const double lost = std::abs(x[i]) < 1e30 ? 1e-38 * (1 + std::abs(x[i])) / 5e-7 : 0;
      expect_near(dtype, y[i], expected, relative * std::abs(expected) + lost, "y", i);
    }
  }
}

TEST_P(ActivationTest, ReluWithAMask) {
  for (const int64_t n : kSizes) {
    const Buffer x = random(n), g = random(n), y = make(n), alone = make(n), grad = make(n);
    if (n > 7) {
      x.set(0, 0.0);
      x.set(1, -0.0);
      x.set(2, std::nan(""));
      x.set(3, INFINITY);
      x.set(4, -INFINITY);
      g.set(0, std::nan(""));
    }
    Mask mask(n);
    relu_forward(nullptr, dtype, x.data(), y.data(), mask.data(), n);
    relu_forward(nullptr, dtype, x.data(), alone.data(), nullptr, n);
    relu_backward(nullptr, dtype, g.data(), mask.data(), grad.data(), n);
    EXPECT_TRUE(y == alone);
    mask.expect_padded();
    for (int64_t i = 0; i < n; ++i) {
      const bool passes = !(x[i] <= 0);
      ASSERT_EQ(mask[i], passes) << i;
      ASSERT_TRUE(y[i] == (passes ? x[i] : 0) || (std::isnan(x[i]) && std::isnan(y[i]))) << i;
      ASSERT_EQ(grad[i], passes ? g[i] : 0) << i;
    }
    relu_forward(nullptr, dtype, x.data(), x.data(), nullptr, n);
    EXPECT_TRUE(x == y);
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
