// Matrices turned round, tile by tile through shared memory: whole rows of a tile are read and
// written by a warp each.
#include "kernels/transpose.h"

#include "kernels/cuda/device.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

struct Turn {
  const void* from;
  int64_t from_stride;
  void* to;
  int64_t to_stride;
  int64_t rows, cols;
  int64_t across;  // tiles of a row
};

// ---- bytes, 4 by 4 in words: a tile is as wide as the words of a warp

constexpr int kBytesSide = 4 * kWarp;
constexpr int64_t kBytesShared = int64_t{kBytesSide} * kWarp * 4;

// The bytes at a row and a column that is a multiple of 4; zeros beyond the end.
template <bool Aligned>
TRANSFORMER_OPS_DEVICE uint32_t get_word(const Turn& turn, int64_t row, int64_t column) {
  if (row >= turn.rows || column >= turn.cols) return 0;
  const uint8_t* const from =
      static_cast<const uint8_t*>(turn.from) + row * turn.from_stride + column;
  if (Aligned && column + 4 <= turn.cols) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < turn.cols) word |= static_cast<uint32_t>(from[i]) << (8 * i);
  }
  return word;
}

template <bool Aligned>
TRANSFORMER_OPS_DEVICE void put_word(const Turn& turn, int64_t row, int64_t column, uint32_t word) {
  if (row >= turn.cols || column >= turn.rows) return;
  uint8_t* const to = static_cast<uint8_t*>(turn.to) + row * turn.to_stride + column;
  if (Aligned && column + 4 <= turn.rows) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < turn.rows) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

template <bool Aligned>
__global__ void __launch_bounds__(kThreads) turn_bytes_kernel(Turn turn) {
  // Word g of a turned row q is at (g + q / 4) % 32: a warp finds its words in 32 banks, whether it
  // writes one of each fourth row or reads a row.
  TRANSFORMER_OPS_SHARED(uint32_t, tile);
  const int64_t top = blockIdx.x / turn.across * kBytesSide;
  const int64_t left = blockIdx.x % turn.across * kBytesSide;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int group = warp; group < kWarp; group += kWarps) {
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = get_word<Aligned>(turn, top + group * 4 + i, left + lane * 4);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) word |= (rows[i] >> (8 * j) & 0xff) << (8 * i);
      tile[(lane * 4 + j) * kWarp + (group + lane) % kWarp] = word;
    }
  }
  __syncthreads();
  for (int row = warp; row < kBytesSide; row += kWarps) {
    put_word<Aligned>(turn, left + row, top + lane * 4,
                      tile[row * kWarp + (lane + row / 4) % kWarp]);
  }
}

// ---- words

constexpr int kWordsSide = kWarp, kPitch = kWarp + 1;
constexpr int64_t kWordsShared = int64_t{kWordsSide} * kPitch * 4;

__global__ void __launch_bounds__(kThreads) turn_words_kernel(Turn turn) {
  TRANSFORMER_OPS_SHARED(uint32_t, tile);
  const int64_t top = blockIdx.x / turn.across * kWordsSide;
  const int64_t left = blockIdx.x % turn.across * kWordsSide;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto* const from = static_cast<const uint32_t*>(turn.from);
  auto* const to = static_cast<uint32_t*>(turn.to);
  for (int row = warp; row < kWordsSide; row += kWarps) {
    if (top + row < turn.rows && left + lane < turn.cols) {
      tile[row * kPitch + lane] = from[(top + row) * turn.from_stride + left + lane];
    }
  }
  __syncthreads();
  for (int row = warp; row < kWordsSide; row += kWarps) {
    if (left + row < turn.cols && top + lane < turn.rows) {
      to[(left + row) * turn.to_stride + top + lane] = tile[lane * kPitch + row];
    }
  }
}

namespace entry {

void transpose(Stream stream, int bytes, const void* from, int64_t from_stride, void* to,
               int64_t to_stride, int64_t rows, int64_t cols) {
  const int side = bytes == 1 ? kBytesSide : kWordsSide;
  const int64_t across = ceil_div(cols, side), blocks = ceil_div(rows, side) * across;
  const Turn turn{from, from_stride, to, to_stride, rows, cols, across};
  if (bytes != 1) {
    return launch(stream, {blocks, kThreads, kWordsShared}, turn_words_kernel, turn);
  }
  const auto in_words = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0 && stride % 4 == 0;
  };
  const bool aligned = in_words(from, from_stride) && in_words(to, to_stride);
  launch(stream, {blocks, kThreads, kBytesShared},
         aligned ? turn_bytes_kernel<true> : turn_bytes_kernel<false>, turn);
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(transpose, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
