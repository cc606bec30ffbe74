#include <functional>
#include <set>

#include "device_test.h"
#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/dropout.h"

namespace transformer_ops::cuda {
namespace {

class BiasTest : public DeviceTest {
 protected:
  // Calls run(sum) for sums in one part, in several and in as many as the kernels ask for, and
  // compares them with the sums of `rows` rows of what is in `of` after the call.
  void check_sums(int64_t rows, int64_t h, const Buffer& of, bool exact,
                  const std::function<void(const ColumnSum&)>& run) {
    const int64_t wanted = column_sum_parts(rows, h);
    for (const int64_t parts : std::set<int64_t>{1, 5, wanted}) {
      const DType out = parts == 5 ? dtype : acc;
      const Buffer sums = make(out, h), partials = make(acc, parts * h);
      run({{sums.data(), out}, parts == 1 ? nullptr : partials.data(), parts});
      for (int64_t c = 0; c < h; ++c) {
        double sum = 0, size = 0;
        for (int64_t r = 0; r < rows; ++r) {
          sum += of[r * h + c];
          size += std::abs(of[r * h + c]);
        }
        // Otherwise sums are of what was not yet rounded.
        const double slack = exact ? 1 : 1 + cpu::format(dtype).epsilon() / 5e-7;
        expect_near(out, sums[c], sum, size * slack, "sum", c);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, BiasTest, testing::ValuesIn(cases()), case_name);

struct Shape {
  int64_t rows, h;
};
constexpr Shape kShapes[] = {{0, 8}, {3, 0}, {1, 1}, {5, 7}, {70, 16}, {9, 40}, {3, 530}};

TEST_P(BiasTest, Adds) {
  for (const auto& [rows, h] : kShapes) {
    for (const DType bias_dtype : {dtype, other, DType::Float64, DType::Float16}) {
      const Buffer x = random(rows * h), b = random(bias_dtype, h), y = make(rows * h);
      const Vector bias{b.data(), bias_dtype};
      bias_add(nullptr, dtype, x.data(), bias, y.data(), rows, h);
      for (int64_t i = 0; i < rows * h; ++i) {
        const double sum = x[i] + b[i % h];
        expect_near(dtype, y[i], sum, std::abs(x[i]) + std::abs(b[i % h]), "y", i);
      }
      bias_add(nullptr, dtype, x.data(), bias, x.data(), rows, h);
      EXPECT_TRUE(x == y) << "in place";
    }
  }
}

TEST_P(BiasTest, Sums) {
  for (const auto& [rows, h] : kShapes) {
    const Buffer x = random(rows * h);
    check_sums(rows, h, x, true, [&, rows = rows, h = h](const ColumnSum& sum) {
      column_sum(nullptr, dtype, x.data(), sum, rows, h);
    });
  }
}

TEST_P(BiasTest, SumsOfManyParts) {
  const int64_t rows = 64 * 20, h = 3;
  ASSERT_EQ(column_sum_parts(rows, h), 20);
  const Buffer x = random(rows * h);
  check_sums(rows, h, x, true,
             [&](const ColumnSum& sum) { column_sum(nullptr, dtype, x.data(), sum, rows, h); });
}

TEST_P(BiasTest, AfterAnActivation) {
  for (const Activation a : {Activation::GELU, Activation::QGELU, Activation::ReLU,
                             Activation::SReLU, Activation::SiLU}) {
    for (const auto& [rows, h] : {Shape{0, 8}, {5, 7}, {70, 16}}) {
      const Buffer x = random(rows * h), g = random(rows * h);
      const Buffer alone = make(rows * h), grad_x = make(rows * h);
      activation_backward(nullptr, a, dtype, g.data(), x.data(), alone.data(), rows * h);
      check_sums(rows, h, alone, false, [&, rows = rows, h = h](const ColumnSum& sum) {
        activation_bias_backward(nullptr, a, dtype, g.data(), x.data(), grad_x.data(), sum, rows,
                                 h);
      });
      EXPECT_TRUE(grad_x == alone);
    }
  }
}

TEST_P(BiasTest, AfterAMask) {
  for (const auto& [rows, h] : kShapes) {
    const Buffer g = random(rows * h), alone = make(rows * h), grad_x = make(rows * h);
    Mask mask = random_mask(rows * h);
    relu_backward(nullptr, dtype, g.data(), mask.data(), alone.data(), rows * h);
    check_sums(rows, h, alone, true, [&, rows = rows, h = h](const ColumnSum& sum) {
      relu_bias_backward(nullptr, dtype, g.data(), mask.data(), grad_x.data(), sum, rows, h);
    });
    EXPECT_TRUE(grad_x == alone);
    for (const double p : {0.3, 1.0}) {
      dropout_backward(nullptr, dtype, g.data(), mask.data(), alone.data(), p, rows * h);
      check_sums(rows, h, alone, false, [&, rows = rows, h = h](const ColumnSum& sum) {
        dropout_bias_backward(nullptr, dtype, g.data(), mask.data(), p, grad_x.data(), sum, rows,
                              h);
      });
      EXPECT_TRUE(grad_x == alone);
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
