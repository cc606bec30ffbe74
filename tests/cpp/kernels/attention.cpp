#include "kernels/attention.h"

#include "kernel_test.h"
#include "kernels/rope.h"

namespace transformer_ops::cpu {
namespace {

// A pair of numbers, and the numbers of its tables.
struct Pair {
  int64_t first, second, table_first, table_second;
};

std::vector<Pair> pairs_of(const Rope& rope) {
  std::vector<Pair> pairs;
  const int64_t half = rope.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = rope.interleaved ? 2 * i : i;
    const int64_t second = rope.interleaved ? first + 1 : i + half;
    pairs.push_back({first, second, rope.by_pair ? i : first, rope.by_pair ? i : second});
  }
  return pairs;
}

TEST_P(KernelTest, Rope) {
  const int64_t rows = 5, first = 3, table_rows = 4;
  for (int64_t head_dim : {2, 6, 64, 130, 1030}) {
    for (const bool by_pair : {false, true}) {
      for (const bool interleaved : {false, true}) {
        for (const bool transposed : {false, true}) {
          const int64_t rotary_dim = head_dim > 2 ? head_dim - 2 : 2, h = 2 * head_dim + 3;
          const int64_t width = by_pair ? rotary_dim / 2 : rotary_dim;
          Array cos = random_acc(table_rows * width), sin = random_acc(table_rows * width);
          const Rope rope{.cos = cos.data(),
                          .sin = sin.data(),
                          .table_rows = table_rows,
                          .by_pair = by_pair,
                          .heads = 2,
                          .head_dim = head_dim,
                          .rotary_dim = rotary_dim,
                          .interleaved = interleaved,
                          .transposed = transposed};
          Array x = random(rows * h), y(dtype, rows * h);
          on(cpu::rope)(dtype, x.data(), rope, y.data(), first, rows, h);
          std::vector<double> wanted(rows * h), size(rows * h);
          for (int64_t i = 0; i < rows * h; ++i) wanted[i] = x[i];
          for (int64_t row = 0; row < rows; ++row) {
            const int64_t table = (first + row) % table_rows * width;
            for (int64_t head = 0; head < 2; ++head) {
              for (const Pair& pair : pairs_of(rope)) {
                const int64_t a = row * h + head * head_dim + pair.first;
                const int64_t b = row * h + head * head_dim + pair.second;
                const double ca = cos[table + pair.table_first],
                             cb = cos[table + pair.table_second];
                double sa = sin[table + pair.table_first], sb = sin[table + pair.table_second];
                if (transposed) {
                  std::swap(sa, sb);
                  sa = -sa;
                  sb = -sb;
                }
                wanted[a] = x[a] * ca - x[b] * sa;
                wanted[b] = x[b] * cb + x[a] * sb;
                size[a] = std::abs(x[a] * ca) + std::abs(x[b] * sa);
                size[b] = std::abs(x[b] * cb) + std::abs(x[a] * sb);
              }
            }
          }
          for (int64_t i = 0; i < rows * h; ++i) {
            expect_near(y[i], wanted[i], 4 * size[i], "rope", i);
          }
          on(cpu::rope)(dtype, x.data(), rope, x.data(), first, rows, h);
          for (int64_t i = 0; i < rows * h; ++i) ASSERT_EQ(x[i], y[i]) << "in place, " << i;
        }
      }
    }
  }
}

TEST_P(KernelTest, AttentionScores) {
  if (dtype != acc) GTEST_SKIP() << "scores are in the compute type";
  const int64_t rows = 3;
  for (int64_t columns : {1, 5, 64, 301}) {
    for (const bool causal : {false, true}) {
      for (const bool masked : {false, true}) {
        Array mask = random(rows * columns), products = random(rows * columns);
        if (masked && columns > 1) {
          for (int64_t i = 0; i < columns; ++i) mask.set(columns + i, -kInf);  // reads nothing
        }
        const int64_t attended = columns / 2 + 1;
        const Scores scores{.columns = columns,
                            .scale = 0.7,
                            .mask = masked ? mask.data() : nullptr,
                            .mask_stride = columns,
                            .attended = attended,
                            .causal = causal,
                            .stride = 2};
        Array p(dtype, rows * columns), again(dtype, rows * columns), statistics(dtype, 2 * rows);
        Array grad = random(rows * columns), given(dtype, rows * columns);
        for (int64_t i = 0; i < rows * columns; ++i) {
          p.set(i, products[i]);
          again.set(i, products[i]);
          given.set(i, grad[i]);
        }
        on(attention_softmax)(acc, p.data(), scores, statistics.data(), rows);
        on(attention_probabilities)(acc, again.data(), scores, statistics.data(), rows);
        on(attention_softmax_backward)(acc, p.data(), scores, grad.data(), rows);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t end = causal ? std::min(attended + r, columns) : columns;
          double greatest = -kInf, sum = 0, along = 0;
          std::vector<double> score(columns, -kInf);
          for (int64_t c = 0; c < end; ++c) {
            const int64_t i = r * columns + c;
            score[c] = products[i] * 0.7 + (masked ? mask[i] : 0.0);
            greatest = std::max(greatest, score[c]);
          }
          for (int64_t c = 0; c < end; ++c) sum += std::exp(score[c] - greatest);
          const bool is_empty = greatest == -kInf;
          EXPECT_NEAR(statistics[2 * r], is_empty ? 0 : greatest + std::log(sum), 1e-5);
          for (int64_t c = 0; c < columns; ++c)
            along += p[r * columns + c] * given[r * columns + c];
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t i = r * columns + c;
            const double wanted = is_empty ? 0 : std::exp(score[c] - greatest) / sum;
            EXPECT_NEAR(p[i], wanted, 1e-5 * wanted) << i;
            EXPECT_NEAR(again[i], wanted, 1e-5 * wanted) << i;
            EXPECT_NEAR(grad[i], 0.7 * p[i] * (given[i] - along), 1e-5 * p[i]) << i;
          }
        }
      }
    }
  }
}

TEST_P(KernelTest, AttentionOfSpecialNumbers) {
  if (dtype != acc) GTEST_SKIP() << "scores are in the compute type";
  struct Row {
    double others, one, mask;
    bool nan_rows;
    double wanted;  // of the row, or NaN for NaN
  };
  const double nan = std::nan("");
  const std::vector<Row> cases = {
      {0, nan, 0, false, nan},       {nan, nan, 0, false, nan}, {-kInf, nan, 0, false, nan},
      {-kInf, -kInf, 0, false, nan}, {0, kInf, 0, false, nan},  {0, 0, nan, false, nan},
      {0, 0, kInf, false, nan},      {0, 0, -kInf, false, 0},   {0, 0, -kInf, true, nan},
      {nan, nan, -kInf, false, 0},   {1e30, 1e30, 0, false, 1}, {0, 0, -3.4e38, false, 1},
      {-1e30, -1e30, 0, false, 1},
  };
  for (const Row& row : cases) {
    for (int64_t columns : {1, 3, 7, 8, 16, 17, 33}) {
      for (int64_t at : {int64_t{0}, columns / 2, columns - 1}) {
        Array mask(dtype, columns), p(dtype, columns), again(dtype, columns), statistic(dtype, 1);
        for (int64_t i = 0; i < columns; ++i) {
          mask.set(i, row.mask);
          p.set(i, i == at ? row.one : row.others);
          again.set(i, p[i]);
        }
        const Scores scores{.columns = columns,
                            .scale = 0.3,  // 0.3e30 is rounded
                            .mask = row.mask == 0 ? nullptr : mask.data(),
                            .mask_stride = columns,
                            .nan_rows = row.nan_rows};
        on(attention_softmax)(acc, p.data(), scores, statistic.data(), 1);
        for (int64_t i = 0; i < columns; ++i) {
          if (std::isnan(row.wanted)) {
            EXPECT_TRUE(std::isnan(p[i])) << row.others << ' ' << row.one << ' ' << columns;
          } else {
            EXPECT_NEAR(p[i], row.wanted / static_cast<double>(columns), 1e-6) << columns;
          }
        }
        if (row.wanted == 0) {
          on(attention_probabilities)(acc, again.data(), scores, statistic.data(), 1);
          for (int64_t i = 0; i < columns; ++i) EXPECT_EQ(again[i], 0) << columns;
        }
      }
    }
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
