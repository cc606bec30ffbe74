// Where the elements of tensors too large for a test are.
#include <gtest/gtest.h>

#include "kernels/cuda/bits.h"
#include "kernels/cuda/glu.h"

namespace transformer_ops::cuda {
namespace {

constexpr int64_t kLarge = (int64_t{1} << 33) + 48;

TEST(Large, GroupsOfBits) {
  EXPECT_EQ(group_size(kLarge, kGroup * kLarge + 3), 3);
  EXPECT_EQ(group_size(kLarge - 1, kGroup * kLarge + 3), kGroup);
  EXPECT_EQ(group_size(kLarge + 1, kGroup * kLarge + 3), 0);
}

TEST(Large, ColumnsOfHalves) {
  const GluLayout layout = glu_layout<8>({}, kLarge);
  const GluColumn<8> column(layout, kLarge / 8 - 1);
  EXPECT_EQ(column.y, kLarge - 8);
  EXPECT_EQ(column.gate, kLarge - 8);
  EXPECT_EQ(column.linear, 2 * kLarge - 8);
  EXPECT_EQ(column.sum(7), kLarge - 1);
  EXPECT_EQ(column.sum(15), 2 * kLarge - 1);
}

TEST(Large, ColumnsOfBlocks) {
  const GluLayout layout = glu_layout<8>({.interleave = 16}, kLarge);
  const GluColumn<8> column(layout, kLarge / 8 - 1);
  EXPECT_EQ(column.y, kLarge - 8);
  EXPECT_EQ(column.gate, 2 * kLarge - 16 - 8);
  EXPECT_EQ(column.linear, 2 * kLarge - 8);
}

}  // namespace
}  // namespace transformer_ops::cuda
