// Transposes matrices tile by tile through shared memory: each warp reads and writes whole rows of
// a tile.
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

// The bytes at a row, and at a column that is a multiple of 4; zeros beyond the end.
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
  // Word g of a transposed row q is at (g + q / 4) % 32: a warp finds its words in 32 banks both
  // when it writes one of each fourth row and when it reads a row.
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

// ---- scales in tiles of 128 rows and 4 blocks: a thread has 4 bytes of a row

constexpr int kTileRows = 128;

struct Tiles {
  const uint8_t* from;
  int64_t height, outer_stride, inner_stride;
  uint32_t* to;
  int64_t outers, inners;
  int64_t across;  // tiles of a row
  int64_t words;
};

__global__ void __launch_bounds__(kThreads) tile_kernel(Tiles tiles) {
  const int64_t at =
      static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x);
  if (at >= tiles.words) return;
  const int64_t tile = at / kTileRows, place = at % kTileRows;
  const int64_t outer = tile / tiles.across * kTileRows + place % 4 * 32 + place / 4;
  const int64_t inner = tile % tiles.across * 4;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (outer >= tiles.outers || inner + i >= tiles.inners) continue;
    const uint8_t* const scale =
        tiles.from + outer / tiles.height * tiles.outer_stride + (inner + i) * tiles.inner_stride;
    word |= static_cast<uint32_t>(*scale) << (8 * i);
  }
  tiles.to[at] = word;
}

// ---- factors of a product

TRANSFORMER_OPS_DEVICE float factor_at(const uint8_t* bytes) {
  if (bytes == nullptr) return 1.0f;
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  float factor;
  memcpy(&factor, &bits, sizeof(factor));
  return factor;
}

__global__ void factors_kernel(const uint8_t* left, const uint8_t* right, float alpha, float beta,
                               float* to) {
  if (threadIdx.x != 0) return;
  to[0] = factor_at(left) * factor_at(right) * alpha;
  to[1] = beta;
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

void tile_scales(Stream stream, const void* from, int64_t height, int64_t outer_stride,
                 int64_t inner_stride, void* to, int64_t outers, int64_t inners) {
  const int64_t across = ceil_div(inners, 4);
  const int64_t words = ceil_div(outers, kTileRows) * across * kTileRows;
  launch(stream, {ceil_div(words, kThreads), kThreads}, tile_kernel,
         Tiles{static_cast<const uint8_t*>(from), height, outer_stride, inner_stride,
               static_cast<uint32_t*>(to), outers, inners, across, words});
}

void join_factors(Stream stream, const void* left, const void* right, float alpha, float beta,
                  float* to) {
  launch(stream, {1, kWarp}, factors_kernel, static_cast<const uint8_t*>(left),
         static_cast<const uint8_t*>(right), alpha, beta, to);
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(transpose, "cuda");
TRANSFORMER_OPS_KERNEL(tile_scales, "cuda");
TRANSFORMER_OPS_KERNEL(join_factors, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
