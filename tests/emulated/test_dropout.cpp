#include "device_test.h"
#include "kernels/dropout.h"

namespace transformer_ops::cuda {
namespace {

struct Words {
  uint32_t word[4];
  bool operator==(const Words&) const = default;
};

Words philox(Words counter, uint64_t key) {
  auto key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  uint32_t* c = counter.word;
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// Known answers of the Random123 distribution (kat_vectors, "philox4x32 7").
TEST(CudaPhilox, ReferenceGivesKnownAnswers) {
  EXPECT_EQ(philox({{0, 0, 0, 0}}, 0), (Words{{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox({{ones, ones, ones, ones}}, ~uint64_t{0}),
            (Words{{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}));
}

uint32_t random_number(const Philox& state, int64_t element) {
  const auto group = static_cast<uint64_t>(element) / 8;
  const uint64_t high = state.offset / 4 + (element % 8 < 4 ? 0 : 1);
  const Words words = philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                               static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}},
                             state.seed);
  return words.word[element % 4];
}

bool kept(const Philox& state, double p, int64_t element) {
  return random_number(state, element) >= p * 4294967296.0;
}

class DropoutTest : public DeviceTest {};
INSTANTIATE_TEST_SUITE_P(Cuda, DropoutTest, testing::ValuesIn(cases()), case_name);

const Philox kState = {.seed = 0x123456789abcdef0u, .offset = (uint64_t{3} << 34) + 4};

TEST_P(DropoutTest, KeepsByPhilox) {
  for (const double p : {0.0, 0.1, 0.5, 0.999, 1.0}) {
    for (const int64_t n : {0, 1, 7, 8, 33, 4096 + 13}) {
      const Buffer x = random(n), y = make(n), alone = make(n), grad = make(n);
      if (n > 0) x.set(n - 1, std::nan(""));
      Mask mask(n);
      dropout_forward(nullptr, dtype, x.data(), y.data(), mask.data(), kState, p, n);
      dropout_forward(nullptr, dtype, x.data(), alone.data(), nullptr, kState, p, n);
      dropout_backward(nullptr, dtype, x.data(), mask.data(), grad.data(), p, n);
      EXPECT_TRUE(y == alone);
      EXPECT_TRUE(y == grad);
      mask.expect_padded();
      for (int64_t i = 0; i < n; ++i) {
        const bool keep = p < 1 && kept(kState, p, i);
        ASSERT_EQ(mask[i], keep) << i;
        const double expected = keep ? x[i] / (1 - p) : 0.0;
        expect_near(dtype, y[i], expected, std::abs(expected), "y", i);
      }
      dropout_forward(nullptr, dtype, x.data(), x.data(), nullptr, kState, p, n);
      EXPECT_TRUE(x == y) << "in place";
    }
  }
}

TEST_P(DropoutTest, TheThresholdIsExact) {
  const int64_t n = 64;
  const Buffer x = make(n), y = make(n);
  for (int64_t i = 0; i < n; ++i) x.set(i, 1.0);
  for (int64_t i = 0; i < n; i += 7) {
    const double bound = random_number(kState, i);
    dropout_forward(nullptr, dtype, x.data(), y.data(), nullptr, kState, bound / 4294967296.0, n);
    EXPECT_NE(y[i], 0);
    dropout_forward(nullptr, dtype, x.data(), y.data(), nullptr, kState, (bound + 1) / 4294967296.0,
                    n);
    EXPECT_EQ(y[i], 0);
  }
}

// A captured graph finds seed and offset on the device; its calls count from there.
TEST_P(DropoutTest, ReadsTheStateOfAGraph) {
  const int64_t n = 1000, seed_at = static_cast<int64_t>(kState.seed), offset_at = 4000;
  const Philox graph = {.offset = kPhiloxOffsets, .seed_at = &seed_at, .offset_at = &offset_at};
  const Philox eager = {.seed = kState.seed, .offset = 4000 + kPhiloxOffsets};
  const Philox next = {.seed = kState.seed, .offset = 4000 + 2 * kPhiloxOffsets};
  const Buffer x = random(n), y = make(n), same = make(n), later = make(n);
  dropout_forward(nullptr, dtype, x.data(), y.data(), nullptr, graph, 0.5, n);
  dropout_forward(nullptr, dtype, x.data(), same.data(), nullptr, eager, 0.5, n);
  dropout_forward(nullptr, dtype, x.data(), later.data(), nullptr, next, 0.5, n);
  EXPECT_TRUE(y == same);
  EXPECT_FALSE(y == later);
}

TEST_P(DropoutTest, BetweenBiasAndResidual) {
  struct Shape {
    int64_t rows, h;
  };
  for (const auto& [rows, h] : {Shape{0, 8}, {3, 0}, {1, 1}, {5, 3}, {7, 13}, {9, 24}, {3, 2056}}) {
    const int64_t n = rows * h;
    for (const double p : {0.0, 0.3, 1.0}) {
      for (const DType sum : {dtype, acc}) {
        for (const DType bias_dtype : {dtype, other}) {
          const Buffer x = random(n), b = random(bias_dtype, h), extra = random(sum, n);
          const Buffer y = make(sum, n), alone = make(sum, n), dropped = make(n);
          const Vector bias{b.data(), bias_dtype};
          Mask mask(n), mask_of_dropout(n);
          bias_dropout_add(nullptr, dtype, sum, x.data(), bias, extra.data(), y.data(), mask.data(),
                           kState, p, rows, h);
          bias_dropout_add(nullptr, dtype, sum, x.data(), bias, extra.data(), alone.data(), nullptr,
                           kState, p, rows, h);
          dropout_forward(nullptr, dtype, x.data(), dropped.data(), mask_of_dropout.data(), kState,
                          p, n);
          EXPECT_TRUE(y == alone);
          EXPECT_TRUE(mask == mask_of_dropout);
          for (int64_t i = 0; i < n; ++i) {
            const double kept_sum = mask[i] ? (x[i] + b[i % h]) / (1 - p) : 0;
            const double size = 2 * (std::abs(x[i]) + std::abs(b[i % h])) + std::abs(extra[i]);
            expect_near(sum, y[i], kept_sum + extra[i], size, "y", i);
          }
          bias_dropout_add(nullptr, dtype, sum, x.data(), bias, extra.data(), extra.data(), nullptr,
                           kState, p, rows, h);
          EXPECT_TRUE(extra == y) << "in place";
        }
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
