// The layout of elementwise kernels over rows and columns. This is host code, except for the
// division.
//
// A row is cut into packs of adjacent elements, one for each thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define TRANSFORMER_OPS_GEOMETRY __host__ __device__ __forceinline__
#else
#define TRANSFORMER_OPS_GEOMETRY inline
#endif

namespace transformer_ops::cuda {

// Division of numbers in [0, 2^63) by d > 0 with a multiplication instead of a call.
// Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994: with
// 2^shift >= d and m = ceil(2^(63 + shift) / d), n / d = floor(n m / 2^(63 + shift)).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t d) {
    if (d == 1) return;
    shift_ = std::bit_width(static_cast<uint64_t>(d - 1)) - 1;
    const auto power = static_cast<unsigned __int128>(1) << (64 + shift_);
    multiplier_ = static_cast<uint64_t>((power + d - 1) / d);
  }

  TRANSFORMER_OPS_GEOMETRY int64_t quotient(int64_t n) const {
    if (multiplier_ == 0) return n;
#if defined(__CUDA_ARCH__)
    const uint64_t high = __umul64hi(static_cast<uint64_t>(n), multiplier_);
#else
    const auto product = static_cast<unsigned __int128>(n) * multiplier_;
    const auto high = static_cast<uint64_t>(product >> 64);
#endif
    return static_cast<int64_t>(high >> shift_);
  }

 private:
  uint64_t multiplier_ = 0;  // 0 divides by 1
  int shift_ = 0;
};

constexpr int kElementThreads = 256;

// Rows are processed in groups of `rows_together`: a thread has one pack of columns of one group.
struct RowGroups {
  int64_t rows, packs;  // packs in a row
  int64_t threads;      // that have work
  Divisor by_packs;

  RowGroups(int64_t rows, int64_t packs, int rows_together)
      : rows(rows),
        packs(packs),
        threads((rows + rows_together - 1) / rows_together * packs),
        by_packs(std::max<int64_t>(packs, 1)) {}

  int64_t blocks() const { return (threads + kElementThreads - 1) / kElementThreads; }
};

// The number of parts of rows for sums over the rows of a matrix. Many small blocks leave few
// multiprocessors idle at the end, but the sums must be few enough to cost little. It depends only
// on the shape, so the order of additions is the same on all devices.
inline int64_t column_parts(int64_t rows, int64_t width) {
  constexpr int64_t kLeastRows = 64, kColumnsOfABlock = 256, kBlocks = 8192, kMostParts = 1024;
  const int64_t across = std::max<int64_t>(1, (width + kColumnsOfABlock - 1) / kColumnsOfABlock);
  const int64_t most = std::clamp<int64_t>(kBlocks / across, 1, kMostParts);
  return std::clamp<int64_t>(rows / kLeastRows, 1, most);
}

// Blocks of threads that process the rows of one part, some packs wide; there are `parts` parts.
struct ColumnBlocks {
  int64_t rows, packs, parts;
  int across, down;  // threads of a block along a row, and along the rows
  int64_t blocks_across;
  Divisor by_blocks_across;
  int64_t least_rows, parts_with_one_more;

  // A block is `most_across` packs wide, a power of two. It is narrower if rows are short, and down
  // to a quarter if there would be too few blocks for the device, and their threads have rows to
  // share.
  ColumnBlocks(int64_t rows, int64_t packs, int64_t parts, int most_across)
      : rows(rows), packs(packs), parts(parts) {
    constexpr int64_t kFewBlocks = 256;
    const auto least = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(packs, 1)));
    across = static_cast<int>(std::min<uint64_t>(least, static_cast<uint64_t>(most_across)));
    const auto blocks_of = [&] { return (packs + across - 1) / across; };
    while (4 * across > most_across && across > 1 && blocks_of() * parts < kFewBlocks &&
           rows / parts > kElementThreads / across) {
      across /= 2;
    }
    down = kElementThreads / across;
    blocks_across = blocks_of();
    by_blocks_across = Divisor(std::max<int64_t>(blocks_across, 1));
    least_rows = rows / parts;
    parts_with_one_more = rows % parts;
  }

  int64_t blocks() const { return blocks_across * parts; }
  // The first row of a part.
  TRANSFORMER_OPS_GEOMETRY int64_t first_row(int64_t part) const {
    return part * least_rows + (part < parts_with_one_more ? part : parts_with_one_more);
  }
};

}  // namespace transformer_ops::cuda
