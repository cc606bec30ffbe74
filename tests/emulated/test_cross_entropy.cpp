// Rows of a cross entropy against their formula in double.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "device_test.h"
#include "kernels/cross_entropy.h"

namespace transformer_ops::cuda {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Wanted {
  double lse = 0, loss = 0, log_prob = 0;
  bool correct = false;
  std::vector<double> gradients;
};

Wanted wanted_of(const kernel::CrossEntropy& op, const Buffer& logits, int64_t row, int64_t target,
                 double factor) {
  Wanted wanted;
  const int64_t n = op.classes;
  wanted.gradients.assign(static_cast<size_t>(n), 0);
  if (target == op.ignore_index) return wanted;
  std::vector<double> z;
  for (int64_t i = 0; i < n; ++i) {
    const double x = logits[row * n + i];
    z.push_back(op.softcap != 0 ? op.softcap * std::tanh(x / op.softcap) : x);
  }
  const double largest = *std::max_element(z.begin(), z.end());
  double powers = 0, sum = 0;
  for (const double each : z) powers += std::exp(each - largest), sum += each;
  const double lse = largest + std::log(powers), own = z[static_cast<size_t>(target)];
  const double smooth = op.label_smoothing / static_cast<double>(n);
  wanted.lse = lse;
  wanted.loss = lse - (1 - op.label_smoothing) * own + op.z_loss * lse * lse;
  if (op.label_smoothing != 0) wanted.loss -= smooth * sum;
  wanted.log_prob = own - lse;
  wanted.correct = true;
  for (int64_t i = 0; i < n; ++i) {
    const double x = logits[row * n + i], at_target = logits[row * n + target];
    if (x > at_target || (x == at_target && i < target)) wanted.correct = false;
    const double each = z[static_cast<size_t>(i)];
    double grad = std::exp(each - lse) * (1 + 2 * op.z_loss * lse) - smooth;
    if (i == target) grad -= 1 - op.label_smoothing;
    if (op.softcap != 0) grad *= 1 - each / op.softcap * (each / op.softcap);
    wanted.gradients[static_cast<size_t>(i)] = factor * grad;
  }
  return wanted;
}

using CrossEntropyTest = DeviceTest;

TEST_P(CrossEntropyTest, LossesAndGradients) {
  const kernel::CrossEntropy ops[] = {
      {1, -100, 0, 0, 0},      {5, -100, 0, 0, 0},          {257, 3, 0.1, 0, 0},
      {1000, -100, 0, 2.5, 0}, {8192, -100, 0.2, 3, 0.125}, {33001, -1, 0, 0, 1e-3},
  };
  for (const auto& op : ops) {
    const int64_t rows = 4, n = op.classes;
    Buffer logits = random(rows * n);
    std::vector<int64_t> targets = {0, n - 1, op.ignore_index, n / 2};
    // Masked classes, as the first ones of a thread and as all but one; and equal logits.
    for (int64_t i = 0; i < n; ++i) {
      if (i % 3 != 0) logits.set(n + i, -kInfinity);
      if (i != n / 2) logits.set(3 * n + i, i % 2 == 0 ? -kInfinity : 1.0);
    }
    logits.set(n + n - 1, 0.5);
    logits.set(3 * n + n / 2, 1.0);
    const Buffer given = logits;
    Buffer factors = random(acc, rows), lse = make(acc, rows), loss = make(acc, rows);
    Buffer log_probs = make(acc, rows), unused = logits;
    std::vector<uint8_t> correct(rows, 0xa5);
    cross_entropy(nullptr, op, dtype, logits.data(), targets.data(),
                  {lse.data(), loss.data(), log_probs.data(), correct.data(), nullptr}, rows);
    EXPECT_TRUE(logits == given);
    for (int64_t r = 0; r < rows; ++r) {
      const Wanted wanted = wanted_of(op, given, r, targets[static_cast<size_t>(r)], 1);
      const double size = 1 + std::abs(wanted.lse) * (1 + op.z_loss * std::abs(wanted.lse));
      expect_near(acc, lse[r], wanted.lse, 4 * size, "lse", r);
      expect_near(acc, loss[r], wanted.loss, 8 * size, "loss", r);
      expect_near(acc, log_probs[r], wanted.log_prob, 8 * size, "log_prob", r);
      EXPECT_EQ(correct[static_cast<size_t>(r)], wanted.correct) << n << " " << r;
    }
    // By the statistics that were kept, and in the call that makes them.
    cross_entropy(nullptr, op, dtype, logits.data(), targets.data(),
                  {.lse = lse.data(), .factors = factors.data()}, rows);
    cross_entropy(nullptr, op, dtype, unused.data(), targets.data(),
                  {lse.data(), loss.data(), log_probs.data(), correct.data(), factors.data()},
                  rows);
    EXPECT_TRUE(logits == unused);
    for (int64_t r = 0; r < rows; ++r) {
      const double factor = factors[r];
      const Wanted wanted = wanted_of(op, given, r, targets[static_cast<size_t>(r)], factor);
      const double size = std::abs(factor) * (2 + std::abs(wanted.lse));
      for (int64_t i = 0; i < n; ++i) {
        expect_near(dtype, logits[r * n + i], wanted.gradients[static_cast<size_t>(i)], 8 * size,
                    "gradient", r * n + i);
      }
    }
  }
}

TEST_P(CrossEntropyTest, InfiniteAndNaNLogitsHaveNoNumber) {
  const kernel::CrossEntropy op{40, -100, 0, 0, 0};
  const double specials[] = {kInfinity, std::numeric_limits<double>::quiet_NaN(), -kInfinity};
  for (const double special : specials) {
    Buffer logits = random(40), lse = make(acc, 1), loss = make(acc, 1), log_probs = make(acc, 1);
    for (int64_t i = 0; i < 40; ++i) {
      if (special == -kInfinity || i == 7) logits.set(i, special);
    }
    const int64_t target = 7;
    uint8_t correct = 0;
    cross_entropy(nullptr, op, dtype, logits.data(), &target,
                  {lse.data(), loss.data(), log_probs.data(), &correct, nullptr}, 1);
    EXPECT_TRUE(std::isnan(loss[0])) << special;
    EXPECT_EQ(correct != 0, special == kInfinity) << special;
  }
}

TEST_P(CrossEntropyTest, ATargetThatIsNoClassIsNamed) {
  const kernel::CrossEntropy op{8, -100, 0, 0, 0};
  Buffer logits = random(8), lse = make(acc, 1);
  const int64_t target = 8;
  try {
    cross_entropy(nullptr, op, dtype, logits.data(), &target,
                  {.lse = lse.data(), .factors = lse.data()}, 1);
    FAIL();
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(),
                 "[LinearCrossEntropy] target must lie in [0, 8) or be ignore_index, -100, got 8");
  }
}

INSTANTIATE_TEST_SUITE_P(, CrossEntropyTest, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace transformer_ops::cuda
