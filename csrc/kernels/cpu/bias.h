// Bias: its sum over rows, alone and in one pass with the gradient of what follows it.
#pragma once

#include "dropout.h"
#include "elementwise.h"
#include "glu.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

void column_sum(DType dtype, const void* x, void* out, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    Row<T> row(h);
    ColumnSums<Acc<T>> sums(out, h);
    Acc<T>* sum = sums.group();
    for (int64_t r = 0; r < rows; ++r) {
      const Acc<T>* v = row.load(as<T>(x) + r * h);
#pragma omp simd
      for (int64_t i = 0; i < h; ++i) sum[i] += v[i];
      sums.end_row();
    }
  });
}

void bias_add(DType dtype, const void* x, const void* bias, void* y, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    alignas(64) A buffer[kBlock];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t start = 0; start < h; start += kBlock) {
        const int64_t count = smaller(kBlock, h - start);
        const A* v = load(as<T>(x) + r * h + start, buffer, count);
        const A* b = as<A>(bias) + start;
        A* staged = staging(as<T>(y) + r * h + start, buffer);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) staged[i] = v[i] + b[i];
        store(staged, as<T>(y) + r * h + start, count);
      }
    }
  });
}

void activation_bias_backward(Activation activation, DType dtype, const void* grad_y, const void* x,
                              void* grad_x, void* grad_bias, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_activation(activation, [&](auto op) {
      alignas(64) A buffer_g[kBlock];
      alignas(64) A buffer_x[kBlock];
      ColumnSums<A> sums(grad_bias, h);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t start = 0; start < h; start += kBlock) {
          const int64_t count = smaller(kBlock, h - start);
          const int64_t offset = r * h + start;
          const A* g = load(as<T>(grad_y) + offset, buffer_g, count);
          const A* v = load(as<T>(x) + offset, buffer_x, count);
          A* staged = staging(as<T>(grad_x) + offset, buffer_g);
          A* sum = sums.group() + start;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) {
            const A grad = op.backward(g[i], v[i]);
            sum[i] += grad;
            staged[i] = grad;
          }
          store(staged, as<T>(grad_x) + offset, count);
        }
        sums.end_row();
      }
    });
  });
}

// grad_x = grad_y * scale where the mask has a bit, else 0, and its sum over rows.
template <class T>
void masked_bias_rows(const T* grad_y, const uint8_t* mask, int64_t first_element, Acc<T> scale,
                      T* grad_x, void* grad_bias, int64_t rows, int64_t h) {
  using A = Acc<T>;
  alignas(64) A buffer[kBlock];
  alignas(64) uint8_t flags[kBlock + 8];
  ColumnSums<A> sums(grad_bias, h);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t start = 0; start < h; start += kBlock) {
      const int64_t count = smaller(kBlock, h - start);
      const int64_t offset = r * h + start;
      const int64_t bit = first_element + offset;
      unpack_bits(mask + bit / 8, flags, bit % 8 + count);
      const uint8_t* passes = flags + bit % 8;
      const A* g = load(grad_y + offset, buffer, count);
      A* staged = staging(grad_x + offset, buffer);
      A* sum = sums.group() + start;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const A grad = passes[i] == 0 ? A(0) : g[i] * scale;
        sum[i] += grad;
        staged[i] = grad;
      }
      store(staged, grad_x + offset, count);
    }
    sums.end_row();
  }
}

void relu_bias_backward(DType dtype, const void* grad_y, const uint8_t* mask, int64_t first_element,
                        void* grad_x, void* grad_bias, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    masked_bias_rows(as<T>(grad_y), mask, first_element, Acc<T>(1), as<T>(grad_x), grad_bias, rows,
                     h);
  });
}

void dropout_bias_backward(DType dtype, const void* grad_y, const uint8_t* mask,
                           int64_t first_element, double p, void* grad_x, void* grad_bias,
                           int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto scale = static_cast<Acc<T>>(dropout_scale(p));
    masked_bias_rows(as<T>(grad_y), mask, first_element, scale, as<T>(grad_x), grad_bias, rows, h);
  });
}

void glu_bias_backward(const Glu& glu, DType dtype, const void* grad_y, const void* x, void* grad_x,
                       void* grad_bias, int64_t rows, int64_t h) {
  const int64_t block = glu.interleave == 0 ? h : glu.interleave;
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_glu<Acc<T>>(glu, [&](auto op) {
      ColumnSums<Acc<T>> sums(grad_bias, 2 * h);
      for (int64_t r = 0; r < rows; ++r) {
        const T* g = as<T>(grad_y) + r * h;
        const T* in = as<T>(x) + 2 * r * h;
        T* out = as<T>(grad_x) + 2 * r * h;
        Acc<T>* sum = sums.group();
        for_each_run(block, 1, h, [=](int64_t gate, int64_t linear, int64_t from, int64_t n) {
          glu_backward_run<true>(op, g + from, in + gate, in + linear, out + gate, out + linear,
                                 sum + gate, sum + linear, n);
        });
        sums.end_row();
      }
    });
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
