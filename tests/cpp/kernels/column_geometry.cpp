// How the CUDA kernels are laid over rows and columns.
#include "../../../csrc/kernels/cuda/column_geometry.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>
#include <vector>

namespace transformer_ops::cuda {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

TEST(ColumnGeometry, DivisorDivides) {
  std::mt19937_64 random(1);
  std::vector<int64_t> numbers = {1,       2, 3, 5, 7, 8, 1000, 1792, 4096, 14336, kLargest - 1,
                                  kLargest};
  for (int bit = 4; bit < 63; ++bit) {
    const int64_t power = int64_t{1} << bit;
    for (const int64_t n : {power - 1, power, power + 1}) numbers.push_back(n);
    numbers.push_back(power + static_cast<int64_t>(random() % static_cast<uint64_t>(power)));
  }
  for (const int64_t d : numbers) {
    const Divisor by_d(d);
    EXPECT_EQ(by_d.quotient(0), 0);
    for (const int64_t n : numbers) ASSERT_EQ(by_d.quotient(n), n / d) << n << " / " << d;
    for (int i = 0; i < 100; ++i) {
      // Multiples are where a quotient changes.
      const int64_t multiple = static_cast<int64_t>(random() >> 1) / d * d;
      ASSERT_EQ(by_d.quotient(multiple), multiple / d) << multiple << " / " << d;
      if (multiple == 0) continue;
      ASSERT_EQ(by_d.quotient(multiple - 1), multiple / d - 1) << multiple << " - 1 / " << d;
    }
  }
}

TEST(ColumnGeometry, RowGroupsHaveAThreadForEachPack) {
  for (const auto& [rows, packs, threads] : {std::array<int64_t, 3>{0, 5, 0},
                                             {1, 5, 5},
                                             {4, 5, 5},
                                             {5, 5, 10},
                                             {7, 0, 0},
                                             {int64_t{1} << 33, 512, int64_t{1} << 40}}) {
    const RowGroups groups(rows, packs, 4);
    EXPECT_EQ(groups.threads, threads);
    EXPECT_GE(groups.blocks() * kElementThreads, threads);
    EXPECT_LT((groups.blocks() - 1) * kElementThreads, std::max<int64_t>(threads, 1));
  }
}

TEST(ColumnGeometry, PartsHaveRowsAndFillTheDevice) {
  EXPECT_EQ(column_parts(0, 0), 1);
  EXPECT_EQ(column_parts(0, 4096), 1);
  EXPECT_EQ(column_parts(127, 1), 1);
  EXPECT_EQ(column_parts(128, 1), 2);
  EXPECT_EQ(column_parts(8192, 1024), 128);
  EXPECT_EQ(column_parts(8192, 2 * 14336), 73);
  EXPECT_EQ(column_parts(int64_t{1} << 40, 1), 1024);
  EXPECT_EQ(column_parts(int64_t{1} << 20, int64_t{1} << 32), 1);
}

TEST(ColumnGeometry, BlocksTakeEachRowOnce) {
  for (const int64_t rows :
       {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{1000003}, (int64_t{1} << 40) + 5}) {
    for (const int64_t parts : {1, 3, 73}) {
      const ColumnBlocks blocks(rows, 7, parts, 32);
      EXPECT_EQ(blocks.first_row(0), 0);
      EXPECT_EQ(blocks.first_row(parts), rows);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t size = blocks.first_row(part + 1) - blocks.first_row(part);
        EXPECT_TRUE(size == rows / parts || size == rows / parts + 1) << size;
      }
    }
  }
}

TEST(ColumnGeometry, BlocksAreAsWideAsRowsAreLong) {
  for (const auto& [packs, across, blocks_across] : {std::array<int64_t, 3>{1, 1, 1},
                                                     {3, 4, 1},
                                                     {32, 32, 1},
                                                     {33, 32, 2},
                                                     {1792, 32, 56},
                                                     {0, 1, 0}}) {
    const ColumnBlocks blocks(8192, packs, 1024, 32);
    EXPECT_EQ(blocks.across, across);
    EXPECT_EQ(blocks.across * blocks.down, kElementThreads);
    EXPECT_EQ(blocks.blocks_across, blocks_across);
    EXPECT_EQ(blocks.blocks(), blocks_across * 1024);
  }
}

TEST(ColumnGeometry, FewBlocksAreNarrow) {
  // 128 packs: 4 blocks of 32, or 16 of 8.
  EXPECT_EQ(ColumnBlocks(64, 128, 1, 32).across, 8);
  EXPECT_EQ(ColumnBlocks(64, 128, 1, 32).down, 32);
  // No thread would have a row more or less.
  EXPECT_EQ(ColumnBlocks(8, 128, 1, 32).across, 32);
  EXPECT_EQ(ColumnBlocks(16, 128, 1, 32).across, 16);
  EXPECT_EQ(ColumnBlocks(8192, 1024, 128, 32).across, 32);
}

}  // namespace
}  // namespace transformer_ops::cuda
