// How CPU loops are divided between threads, as a function of sizes and of the number of threads.
// It knows no tensors, so that benchmarks/threads.py can compute it for any number of cores.
#pragma once

#include <algorithm>
#include <cstdint>

namespace transformer_ops::cpu {

// Fewer than 2 * kGrain elements take about as long as waking a second thread.
constexpr int64_t kGrain = 32768;

// Units of `align` items; a thread takes at least `grain` of them.
struct LoopSplit {
  int64_t units;
  int64_t grain;

  bool is_serial() const { return units < 2 * grain; }
  // What at::parallel_for uses of `threads`.
  int64_t active(int64_t threads) const {
    return is_serial() ? 1 : std::min(threads, (units + grain - 1) / grain);
  }
};

// An item costs as much as `work` elements.
inline LoopSplit split_loop(int64_t count, int64_t work, int64_t align) {
  const int64_t elements = std::max<int64_t>(1, work * align);
  return {(count + align - 1) / align, std::max<int64_t>(1, kGrain / elements)};
}

// The number of parts of a sum over rows. It depends on sizes alone, so the sum does not depend on
// the number of threads. More parts than this would take memory and time to add up.
inline int64_t sum_parts(int64_t rows, int64_t width) {
  constexpr int64_t kMostParts = 16;
  constexpr int64_t kElementsPerPart = 65536;
  return std::clamp<int64_t>(rows * width / kElementsPerPart, 1, std::min(kMostParts, rows + 1));
}

// Do groups run side by side, each product on one thread, instead of one after the other on all
// threads? `active` groups have rows; a row costs `work` multiplications.
inline bool groups_side_by_side(int64_t active, int64_t rows, int64_t work, int64_t threads) {
  // Products on several threads wake the threads for each group; those on one thread do not.
  constexpr int64_t kMostWork = int64_t{1} << 26;
  return threads > 1 && active >= 2 * threads &&
         rows / std::max<int64_t>(1, active) * work <= kMostWork;
}

}  // namespace transformer_ops::cpu
