#include "kernels/dropout.h"
#include "kernel_test.h"

namespace transformer_ops::cpu {
namespace {

struct Words {
  uint32_t word[4];
  bool operator==(const Words&) const = default;
};

Words philox(Words counter, uint32_t key0, uint32_t key1) {
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
TEST(Philox, ReferenceGivesKnownAnswers) {
  EXPECT_EQ(philox({{0, 0, 0, 0}}, 0, 0),
            (Words{{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox({{ones, ones, ones, ones}}, ones, ones),
            (Words{{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}));
}

// Bits 16 (element % 8) and up of the counter (element / 8, stream).
uint32_t piece(uint64_t seed, int64_t element, uint32_t stream) {
  const auto counter = static_cast<uint64_t>(element) / 8;
  const Words words =
      philox({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream, 0}},
             static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return words.word[element % 8 / 2] >> (16 * (element % 2)) & 0xffff;
}

bool kept(uint64_t seed, double p, int64_t element) {
  const uint32_t random = piece(seed, element, 0) << 16 | piece(seed, element, 1);
  return random >= p * 4294967296.0;
}

TEST_P(KernelTest, Dropout) {
  const uint64_t seed = 0x123456789abcdef0u;
  for (double p : {0.0, 0.1, 0.5, 0.999, 1.0}) {
    for (int64_t first : {int64_t{0}, int64_t{8}, int64_t{1} << 35, (int64_t{1} << 34) - 64}) {
      for (int64_t n : kSizes) {
        Array x = random(n), y(dtype, n), grad(dtype, n), again(dtype, n), without_mask(dtype, n);
        std::vector<uint8_t> mask((n + 7) / 8, 0xff);
        on(dropout_forward)(dtype, x.data(), y.data(), mask.data(), seed, p, first, n);
        on(dropout_forward)(dtype, x.data(), without_mask.data(), nullptr, seed, p, first, n);
        on(dropout_backward)(dtype, x.data(), mask.data(), grad.data(), p, n);
        on(dropout_backward_from_seed)(dtype, x.data(), again.data(), seed, p, first, n);
        const double scale = p < 1 ? 1 / (1 - p) : 0.0;
        for (int64_t i = 0; i < n; ++i) {
          const bool keep = kept(seed, p, first + i);
          ASSERT_EQ((mask[i / 8] >> (i % 8)) & 1, keep) << i;
          const double expected = keep ? x[i] * scale : 0.0;
          expect_near(y[i], expected, 4 * std::abs(expected), "forward", i);
          ASSERT_EQ(y[i], grad[i]);
          ASSERT_EQ(y[i], again[i]);
          ASSERT_EQ(y[i], without_mask[i]);
        }
        if (n % 8 != 0) {
          EXPECT_EQ(mask.back() >> (n % 8), 0);
        }
      }
    }
  }
}

// The lower half of the random integer decides only where the upper half equals that of p * 2^32.
TEST_P(KernelTest, DropoutDrawsTheLowerHalfWhereItMatters) {
  const uint64_t seed = 99;
  const int64_t n = 4096;
  Array x(dtype, n, 1.0), y(dtype, n);
  int64_t undecided = 0;
  for (int64_t element = 0; element < n; element += 37) {
    const uint32_t upper = piece(seed, element, 0), lower = piece(seed, element, 1);
    // The probabilities at which this element is just kept, and just dropped.
    for (uint32_t bound : {lower, lower + 1}) {
      const double p = (upper * 65536.0 + bound) / 4294967296.0;
      on(dropout_forward)(dtype, x.data(), y.data(), nullptr, seed, p, 0, n);
      ASSERT_EQ(y[element] != 0, bound == lower);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(y[i] != 0, kept(seed, p, i)) << i;
        undecided += piece(seed, i, 0) == upper ? 1 : 0;
      }
    }
  }
  EXPECT_GT(undecided, 2 * (n / 37));
}

TEST_P(KernelTest, DropoutDoesNotDependOnTheSplit) {
  const int64_t n = 4000;
  Array x = random(n), whole(dtype, n), parts(dtype, n);
  std::vector<uint8_t> mask(n / 8), mask_of_parts(n / 8);
  on(dropout_forward)(dtype, x.data(), whole.data(), mask.data(), 7, 0.3, 0, n);
  const int64_t bytes = format(dtype).bytes;
  for (int64_t start = 0; start < n; start += 1240) {
    const int64_t count = std::min<int64_t>(1240, n - start);
    on(dropout_forward)(dtype, static_cast<char*>(x.data()) + start * bytes,
                        static_cast<char*>(parts.data()) + start * bytes,
                        mask_of_parts.data() + start / 8, 7, 0.3, start, count);
  }
  EXPECT_EQ(mask, mask_of_parts);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(whole[i], parts[i]);
}

TEST_P(KernelTest, DropoutIsZeroWhereDroppedWhateverTheInput) {
  Array x(dtype, 100, kNan), y(dtype, 100);
  on(dropout_forward)(dtype, x.data(), y.data(), nullptr, 7, 0.5, 0, 100);
  for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(std::isnan(y[i]), kept(7, 0.5, i)) << i;
}

}  // namespace
}  // namespace transformer_ops::cpu
