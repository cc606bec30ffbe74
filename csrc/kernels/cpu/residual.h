// Adding a residual, in one pass with the dropout before it or the norm after it.
#pragma once

#include "dropout.h"
#include "norm.h"

namespace transformer_ops::cpu {
namespace {

// ---- bias, dropout, residual ----

// y = extra + (x + bias) scale where kept, else extra; x starts at this column of a row of h.
template <class T, class Sum>
void bias_dropout_add_block(const T* x, const Acc<T>* bias, int64_t column, int64_t h,
                            const Sum* extra, Sum* y, const uint8_t* flags, Acc<T> scale,
                            int64_t n) {
  using A = Acc<T>;
  alignas(64) A buffer_x[kBlock];
  alignas(64) A buffer_e[kBlock];
  const A* in = load(x, buffer_x, n);
  const A* e = load(extra, buffer_e, n);
  A* staged = staging(y, buffer_x);
  for (int64_t start = 0; start < n;) {
    const int64_t count = smaller(n - start, h - column);
    const A* b = bias + column;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const A kept = (in[start + i] + b[i]) * scale;
      staged[start + i] = e[start + i] + (flags[start + i] == 0 ? A(0) : kept);
    }
    start += count;
    column = 0;
  }
  store(staged, y, n);
}

template <class T, class Sum>
void bias_dropout_add_range(const T* x, const Acc<T>* bias, const Sum* extra, Sum* y, uint8_t* mask,
                            uint64_t seed, double p, int64_t first, int64_t n, int64_t h) {
  const bool draws = p > 0.0 && p < 1.0;
  const uint32_t threshold = draws ? keep_threshold(p) : 0;
  // With p = 1 nothing is kept, and any finite scale will do.
  const auto scale = static_cast<Acc<T>>(p < 1.0 ? 1.0 / (1.0 - p) : 0.0);
  alignas(64) uint8_t flags[kBlock];
  memset(flags, p < 1.0 ? 1 : 0, kBlock);
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = smaller(kBlock, n - start);
    if (draws) draw_flags(seed, threshold, first + start, flags, count);
    bias_dropout_add_block(x + start, bias, (first + start) % h, h, extra + start, y + start, flags,
                           scale, count);
    if (mask != nullptr) pack_bits(flags, mask + start / 8, count);
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

// to = x + extra
template <class T>
void add(const T* x, const T* extra, T* to, int64_t n) {
  if constexpr (__is_same(T, BFloat16)) {
    // Converted in registers: buffers would cost more than the sum.
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) from_float(to_float(x[i]) + to_float(extra[i]), to[i]);
  } else {
    map(x, extra, to, n, [](Acc<T> a, Acc<T> b) { return a + b; });
  }
}

// The sum of a few rows, rounded to T, is still in the cache when norm(sum, first row, rows) reads
// it. A null sum is not kept.
template <class T, class Norm>
void add_norm_tiles(const T* x, const T* extra, T* sum, int64_t rows, int64_t h, Norm norm) {
  constexpr int64_t kTile = 8192;
  const int64_t tile = h < kTile ? kTile / h : 1;
  Scratch<T> scratch(sum == nullptr ? tile * h : 0);
  for (int64_t r = 0; r < rows; r += tile) {
    const int64_t count = smaller(tile, rows - r);
    T* to = sum == nullptr ? scratch.data() : sum + r * h;
    add(x + r * h, extra + r * h, to, count * h);
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
