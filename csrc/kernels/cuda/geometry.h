// The distribution of rows over threads in the kernels of norms: host code.
//
// A row is cut into packs of adjacent elements. Thread l of the `lanes` that share the row has
// packs l, l + lanes, l + 2 lanes...
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace transformer_ops::cuda {

struct RowSplit {
  int lanes = 0;  // a power of two up to a warp, above it whole warps; 0: the row does not fit
  int rows = 0;   // rows that a block processes side by side

  bool fits() const { return lanes > 0; }
  int threads() const { return lanes * rows; }
};

// The least number of lanes that have at most `packs_a_lane` packs each.
inline int64_t row_lanes(int64_t packs, int packs_a_lane) {
  constexpr int64_t kWarp = 32;
  const int64_t lanes = std::max<int64_t>(1, (packs + packs_a_lane - 1) / packs_a_lane);
  if (lanes > kWarp) return (lanes + kWarp - 1) / kWarp * kWarp;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(lanes)));
}

// For kernels without sums over rows: small blocks, so that some compute or store while others wait
// for memory. A row within a warp needs no barrier, and stays within one up to 8 packs a lane; 8
// adjacent lanes have a cache line.
inline RowSplit forward_split(int64_t packs) {
  constexpr int64_t kThreads = 128, kMostThreads = 512, kWarp = 32;
  const int64_t short_row =
      std::min(std::max(row_lanes(packs, 4), std::min<int64_t>(8, row_lanes(packs, 1))), kWarp);
  const auto lanes = static_cast<int>(std::clamp(row_lanes(packs, 8), short_row, kMostThreads));
  return {lanes, lanes <= kWarp ? static_cast<int>(kThreads) / lanes : 1};
}

// For backward: one block for each multiprocessor loops over rows, and copies the next rows to
// `stages` buffers in shared memory. Its threads keep sums over their rows in registers.
struct BackwardSplit : RowSplit {
  int stages = 0;
  int64_t stage_bytes = 0;

  int64_t shared_bytes() const { return stages * stage_bytes; }
};

constexpr int kMostStages = 4;

// For rows of `tensors` tensors with packs of `pack_bytes`, at most `packs_a_lane` for a thread.
inline BackwardSplit backward_split(int64_t packs, int64_t pack_bytes, int packs_a_lane,
                                    int tensors, int most_threads, int64_t most_shared_bytes) {
  // The rows of two tensors take 64 KiB: on H100 three stages fit, and two are always in flight,
  // four times as much as hides 800 ns of latency at 4.8 TB/s.
  const int64_t threads =
      std::min<int64_t>((int64_t{32} << 10) / (pack_bytes * packs_a_lane), most_threads);
  const int64_t lanes = row_lanes(packs, packs_a_lane);
  if (lanes > most_threads) return {};
  BackwardSplit split;
  split.lanes = static_cast<int>(lanes);
  split.rows = static_cast<int>(std::max<int64_t>(1, threads / lanes));
  split.stage_bytes = split.threads() * packs_a_lane * pack_bytes * tensors;
  split.stages =
      static_cast<int>(std::min<int64_t>(kMostStages, most_shared_bytes / split.stage_bytes));
  return split.stages > 0 ? split : BackwardSplit{};
}

}  // namespace transformer_ops::cuda
