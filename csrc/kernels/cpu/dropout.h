// Dropout with a counter-based generator: any range can be drawn on its own, and drawn again.
#pragma once

#include "elementwise.h"
#include "philox.h"

namespace transformer_ops::cpu {
namespace {

// An element is kept where its 32-bit random integer is at least p * 2^32.
uint32_t keep_threshold(double p) {
  const double exact = p * 4294967296.0;
  const auto below = static_cast<uint64_t>(exact);
  const uint64_t threshold = static_cast<double>(below) < exact ? below + 1 : below;
  return static_cast<uint32_t>(threshold < 0xffffffffu ? threshold : 0xffffffffu);
}

// flags[i] = 1 where element first + i is kept, for n <= kBlock; flags has room for kBlock.
void draw_flags(uint64_t seed, uint32_t threshold, int64_t first, uint8_t* flags, int64_t n) {
  const auto counter = static_cast<uint64_t>(first) / 4;
  for (int64_t i = 0; i < n; i += 4 * kCountersAtOnce) {
    philox_flags(seed, counter + static_cast<uint64_t>(i) / 4, threshold, flags + i);
  }
}

template <class T>
void dropout_block(const T* x, T* y, const uint8_t* flags, Acc<T> scale, int64_t n) {
  alignas(64) Acc<T> buffer[kBlock];
  const Acc<T>* in = load(x, buffer, n);
  Acc<T>* staged = staging(y, buffer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) staged[i] = flags[i] == 0 ? Acc<T>(0) : in[i] * scale;
  store(staged, y, n);
}

void dropout_forward(DType dtype, const void* x, void* y, uint8_t* mask, uint64_t seed, double p,
                     int64_t first, int64_t n) {
  if (n == 0) return;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    if (p >= 1.0) {
      memset(y, 0, static_cast<size_t>(n) * sizeof(T));
      if (mask != nullptr) memset(mask, 0, static_cast<size_t>((n + 7) / 8));
      return;
    }
    const uint32_t threshold = keep_threshold(p);
    const auto scale = static_cast<Acc<T>>(1.0 / (1.0 - p));
    alignas(64) uint8_t flags[kBlock];
    for (int64_t start = 0; start < n; start += kBlock) {
      const int64_t count = smaller(kBlock, n - start);
      draw_flags(seed, threshold, first + start, flags, count);
      dropout_block(as<T>(x) + start, as<T>(y) + start, flags, scale, count);
      if (mask != nullptr) pack_bits(flags, mask + start / 8, count);
    }
  });
}

// With p = 1 no bit is set, and any finite scale will do.
double dropout_scale(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

void dropout_backward(DType dtype, const void* grad_y, const uint8_t* mask, void* grad_x, double p,
                      int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    scale_masked(as<T>(grad_y), mask, as<T>(grad_x), static_cast<Acc<T>>(dropout_scale(p)), n);
  });
}

void dropout_backward_from_seed(DType dtype, const void* grad_y, void* grad_x, uint64_t seed,
                                double p, int64_t first, int64_t n) {
  dropout_forward(dtype, grad_y, grad_x, nullptr, seed, p, first, n);
}

}  // namespace
}  // namespace transformer_ops::cpu
