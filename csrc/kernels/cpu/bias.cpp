// The bias gradient: the sum over rows, alone and in one pass with the gradient of the op after it.
#include "kernels/bias.h"

#include "draw.h"
#include "kernels/choose.h"
#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_activation;

// Writes the rows f(r, i, lanes) to y, and adds them, before they are rounded, to the column sums.
template <class T, class F>
TRANSFORMER_OPS_INLINE void write_and_sum_rows(bool stream, T* y, void* total, int64_t rows,
                                               int64_t h, F f) {
  ColumnSums<Acc<T>> sums(total, h);
  Acc<T>* sum = sums.group();
  for (int64_t r = 0; r < rows; ++r) {
    write_row(
        y + r * h, h, stream, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto out = f(r, i, lanes);
          store_acc(sum + i, load_acc<T>(sum + i, lanes) + out, lanes);
          return out;
        });
    sums.end_row();
  }
}

// grad_x = f(grad_y) where the mask has a bit, else 0, and its sum over rows.
template <class T, class F>
void masked_bias_rows(const T* grad_y, const uint8_t* mask, int64_t first_element, F f, T* grad_x,
                      void* grad_bias, int64_t rows, int64_t h) {
  const int64_t last_byte = (first_element + rows * h - 1) / 8;
  const auto gradient = [=](int64_t r, int64_t i, auto lanes) __attribute__((always_inline)) {
    const uint64_t bits = bits_from(mask, first_element + r * h + i, last_byte);
    return where_bits(bits, f(load(grad_y + r * h + i, lanes)));
  };
  with_streaming(grad_x, rows, h, [&](bool stream) {
    write_and_sum_rows(stream, grad_x, grad_bias, rows, h, gradient);
  });
}

namespace entry {

void column_sum(DType dtype, const void* x, void* out, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    ColumnSums<Acc<T>> sums(out, h);
    Acc<T>* sum = sums.group();
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = as<T>(x) + r * h;
      for_vectors<T>(
          h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
            store_acc(sum + i, load_acc<T>(sum + i, lanes) + load(row + i, lanes), lanes);
          });
      sums.end_row();
    }
  });
}

void bias_add(DType dtype, const void* x, const void* bias, void* y, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto* b = as<Acc<T>>(bias);
    with_streaming(as<T>(y), rows, h, [&](bool stream) {
      for (int64_t r = 0; r < rows; ++r) {
        const T* row = as<T>(x) + r * h;
        write_row(
            as<T>(y) + r * h, h, stream, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
              return load(row + i, lanes) + load_acc<T>(b + i, lanes);
            });
      }
    });
  });
}

void activation_bias_backward(Activation activation, DType dtype, const void* grad_y, const void* x,
                              void* grad_x, void* grad_bias, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      const T *g = as<T>(grad_y), *v = as<T>(x);
      const auto gradient = [=](int64_t r, int64_t i, auto lanes) __attribute__((always_inline)) {
        return op.backward(load(g + r * h + i, lanes), load(v + r * h + i, lanes));
      };
      with_streaming(as<T>(grad_x), rows, h, [&](bool stream) {
        write_and_sum_rows(stream, as<T>(grad_x), grad_bias, rows, h, gradient);
      });
    });
  });
}

void relu_bias_backward(DType dtype, const void* grad_y, const uint8_t* mask, int64_t first_element,
                        void* grad_x, void* grad_bias, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto pass = [](auto grad) __attribute__((always_inline)) { return grad; };
    masked_bias_rows(as<T>(grad_y), mask, first_element, pass, as<T>(grad_x), grad_bias, rows, h);
  });
}

void dropout_bias_backward(DType dtype, const void* grad_y, const uint8_t* mask,
                           int64_t first_element, double p, void* grad_x, void* grad_bias,
                           int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const Vec<T> scale(static_cast<Acc<T>>(dropout_scale(p)));
    const auto pass = [=](auto grad) __attribute__((always_inline)) {
      return grad * decltype(grad)(scale);
    };
    masked_bias_rows(as<T>(grad_y), mask, first_element, pass, as<T>(grad_x), grad_bias, rows, h);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(column_sum, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(bias_add, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(activation_bias_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(relu_bias_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(dropout_bias_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
