#include <gtest/gtest.h>

#include "../../../csrc/kernels/cuda/geometry.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kWarp = 32;

// What every kernel counts on.
void expect_sound(const RowSplit& split, int most_threads) {
  ASSERT_GE(split.rows, 1);
  ASSERT_GE(split.lanes, 1);
  EXPECT_EQ(split.threads() % kWarp, 0);
  EXPECT_LE(split.threads(), most_threads);
  if (split.lanes <= kWarp) {
    EXPECT_EQ(kWarp % split.lanes, 0) << "a row must not cross warps";
  } else {
    EXPECT_EQ(split.lanes % kWarp, 0) << "a row has warps of its own";
  }
}

TEST(NormGeometry, Forward) {
  for (int64_t packs = 0; packs < 20000; packs += 1 + packs / 50) {
    const RowSplit split = forward_split(packs);
    expect_sound(split, 512);
    EXPECT_GE(split.threads(), kWarp);
    if (split.lanes > kWarp) {
      EXPECT_EQ(split.rows, 1) << "one row a block barrier";
    }
    if (split.lanes < 512) {
      EXPECT_LE(packs, 8 * split.lanes) << "few packs a thread";
    }
    if (split.lanes > 1) {
      EXPECT_GT(2 * packs, split.lanes) << "few idle lanes";
    }
  }
  EXPECT_EQ(forward_split(16).lanes, 8);    // 128 of 16 bits
  EXPECT_EQ(forward_split(512).lanes, 64);  // 4096 of 16 bits
  EXPECT_EQ(forward_split(int64_t{1} << 40).lanes, 512);
}

struct Device {
  const char* name;
  int64_t shared_bytes;
};
constexpr Device kDevices[] = {{"H100", 226 << 10}, {"A100", 162 << 10}, {"RTX 4090", 98 << 10}};

TEST(NormGeometry, BackwardLeavesEndlessRowsToAnotherKernel) {
  EXPECT_FALSE(backward_split(int64_t{1} << 40, 16, 4, 2, 512, 226 << 10).fits());
}

TEST(NormGeometry, Backward) {
  struct Kind {
    int pack_bytes, packs_a_lane, bytes;
  };
  for (const auto [pack_bytes, packs_a_lane, bytes] :
       {Kind{16, 4, 2}, Kind{16, 8, 4}, Kind{16, 8, 8}, Kind{2, 16, 2}, Kind{4, 16, 4},
        Kind{8, 8, 8}}) {
    for (const auto& [name, shared_bytes] : kDevices) {
      for (const int tensors : {2, 3}) {
        for (const int most : {384, 512}) {
          for (int64_t packs = 0; packs < 9000; packs += 1 + packs / 50) {
            SCOPED_TRACE(testing::Message() << name << ": " << packs << " packs of " << pack_bytes
                                            << ", " << tensors << " tensors");
            const auto split =
                backward_split(packs, pack_bytes, packs_a_lane, tensors, most, shared_bytes);
            if (!split.fits()) {
              // Too many packs, or a stage that no block has room for.
              const int64_t row_bytes = packs * pack_bytes * tensors;
              EXPECT_TRUE(packs > packs_a_lane * most || 2 * row_bytes > shared_bytes);
              continue;
            }
            expect_sound(split, most);
            EXPECT_LE(packs, packs_a_lane * split.lanes);
            EXPECT_LE(split.shared_bytes(), shared_bytes);
            EXPECT_GE(split.stages, 1);
            EXPECT_LE(split.stages, kMostStages);
            // Barriers are 1 to 15, one for each row that has more than a warp.
            if (split.lanes > kWarp) {
              EXPECT_LE(split.rows, 15);
            }
            // All threads' sums over rows fit where the stages were.
            const int64_t compute_bytes = bytes == 8 ? 8 : 4;
            const int64_t elements = packs_a_lane * pack_bytes / bytes;
            EXPECT_LE(split.threads() * elements * compute_bytes, split.stage_bytes);
          }
        }
      }
    }
  }
}

// The case that the kernel was laid out for: 4096 numbers of 16 bits.
TEST(NormGeometry, BackwardKeepsTwoStagesInFlight) {
  const auto split = backward_split(512, 16, 4, 2, 512, 226 << 10);
  EXPECT_EQ(split.lanes, 128);
  EXPECT_EQ(split.rows, 4);
  EXPECT_EQ(split.stages, 3);
}

}  // namespace
}  // namespace transformer_ops::cuda
