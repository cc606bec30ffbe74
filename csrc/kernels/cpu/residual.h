// Adding a residual, in one pass with the dropout before it or the norm after it.
#pragma once

#include "dropout.h"
#include "norm.h"

namespace transformer_ops::cpu {
namespace {

// ---- bias, dropout, residual ----

template <class T, class Sum, class Lanes>
TRANSFORMER_OPS_INLINE auto load_sum(const Sum* p, Lanes lanes) {
  if constexpr (__is_same(T, Sum)) {
    return load(p, lanes);
  } else {
    return load_acc<T>(p, lanes);
  }
}
template <class T, class Sum, class V, class Lanes>
TRANSFORMER_OPS_INLINE void store_sum(Sum* p, V x, Lanes lanes) {
  if constexpr (__is_same(T, Sum)) {
    store(p, x, lanes);
  } else {
    store_acc(p, x, lanes);
  }
}

// y = extra + (x + bias) scale where a bit is set, else extra; x starts at this column of a row of
// h.
template <class T, class Sum>
void bias_dropout_add_block(const T* x, const Acc<T>* bias, int64_t column, int64_t h,
                            const Sum* extra, Sum* y, const BitBlock& block, Acc<T> scale,
                            int64_t n) {
  const auto* bits = reinterpret_cast<const uint8_t*>(block.word);
  for (int64_t start = 0; start < n;) {
    const int64_t count = smaller(n - start, h - column);
    for_vectors<T>(
        count, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto sum = load(x + start + i, lanes) + load_acc<T>(bias + column + i, lanes);
          const auto kept =
              where_bits(bits_from(bits, start + i, kBitBlock / 8 - 1), sum * Vec<T>(scale));
          store_sum<T>(y + start + i, load_sum<T>(extra + start + i, lanes) + kept, lanes);
        });
    start += count;
    column = 0;
  }
}

template <class T, class Sum>
void bias_dropout_add_range(const T* x, const Acc<T>* bias, const Sum* extra, Sum* y, uint8_t* mask,
                            uint64_t seed, double p, int64_t first, int64_t n, int64_t h) {
  const bool draws = p > 0.0 && p < 1.0;
  const uint32_t threshold = draws ? keep_threshold(p) : 0;
  const auto scale = static_cast<Acc<T>>(dropout_scale(p));
  BitBlock block;
  memset(&block, p < 1.0 ? 0xff : 0, sizeof(block));
  for (int64_t start = 0; start < n; start += kBitBlock) {
    const int64_t count = smaller(kBitBlock, n - start);
    if (draws) draw_bits(seed, threshold, first + start, block);
    bias_dropout_add_block(x + start, bias, (first + start) % h, h, extra + start, y + start, block,
                           scale, count);
    if (mask != nullptr) write_bits(mask, start, count, block);
  }
}

void bias_dropout_add(DType dtype, DType sum_dtype, const void* x, const void* bias,
                      const void* extra, void* y, uint8_t* mask, uint64_t seed, double p,
                      int64_t first, int64_t n, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto run = [&]<class Sum>(Tag<Sum>) {
      bias_dropout_add_range(as<T>(x), as<Acc<T>>(bias), as<Sum>(extra), as<Sum>(y), mask, seed, p,
                             first, n, h);
    };
    return dtype == sum_dtype ? run(Tag<T>()) : run(Tag<Acc<T>>());
  });
}

// ---- residual, norm ----

// The sum of a few rows, rounded to T, is still in the cache when norm(sum, first row, rows) reads
// it. A null sum is not kept.
template <class T, class Norm>
void add_norm_tiles(const T* x, const T* extra, T* sum, int64_t rows, int64_t h, Norm norm) {
  constexpr int64_t kTile = 8192;
  const int64_t tile = 0 < h && h < kTile ? kTile / h : 1;
  Scratch<T> scratch(sum == nullptr ? tile * h : 0);
  for (int64_t r = 0; r < rows; r += tile) {
    const int64_t count = smaller(tile, rows - r);
    T* to = sum == nullptr ? scratch.data() : sum + r * h;
    map(
        to, count * h, [](auto a, auto b) __attribute__((always_inline)) { return a + b; },
        x + r * h, extra + r * h);
    norm(to, r, count);
  }
}

void add_layer_norm_forward(DType dtype, const void* x, const void* extra, const void* gamma,
                            const void* beta, double eps, void* sum, void* y, void* mean,
                            void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    add_norm_tiles(as<T>(x), as<T>(extra), as<T>(sum), rows, h,
                   [=](const T* in, int64_t r, int64_t count) {
                     layer_norm_forward(dtype, in, gamma, beta, eps, as<T>(y) + r * h,
                                        as<A>(mean) + r, as<A>(rstd) + r, count, h);
                   });
  });
}

void add_rms_norm_forward(DType dtype, const void* x, const void* extra, const void* gamma,
                          double eps, void* sum, void* y, void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    add_norm_tiles(
        as<T>(x), as<T>(extra), as<T>(sum), rows, h, [=](const T* in, int64_t r, int64_t count) {
          rms_norm_forward(dtype, in, gamma, eps, as<T>(y) + r * h, as<Acc<T>>(rstd) + r, count, h);
        });
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
