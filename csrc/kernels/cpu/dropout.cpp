// Dropout, alone and with the bias before it and the residual after it.
#include "kernels/dropout.h"

#include "draw.h"
#include "masked.h"

namespace transformer_ops::cpu {
namespace {

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

// y = extra + (x + bias) scale where a bit is set, else extra. x starts at `column` of a row of h
// elements.
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

namespace entry {

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
    const Vec<T> scale(static_cast<Acc<T>>(1.0 / (1.0 - p)));
    const auto f = [=](Vec<T> v, uint64_t bits) __attribute__((always_inline)) {
      return where_bits(bits, v * scale);
    };
    const auto draw = [=](int64_t start, int64_t, BitBlock & block) __attribute__((always_inline)) {
      draw_bits(seed, threshold, first + start, block);
    };
    const auto write = [=](int64_t start, int64_t count, const BitBlock& block) {
      if (mask != nullptr) write_bits(mask, start, count, block);
    };
    map_bits(as<T>(y), n, f, draw, write, as<T>(x));
  });
}

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

}  // namespace entry

TRANSFORMER_OPS_KERNEL(dropout_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(dropout_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(dropout_backward_from_seed, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(bias_dropout_add, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
