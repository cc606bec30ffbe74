// Multiplies rows by a vector, and each row by a number.
#include "kernels/row_scale.h"

#include "rows.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

template <class T>
Vec<T> factor_of(const RowScale& scale, int64_t row) {
  if (scale.factors == nullptr) return Vec<T>(1);
  return Vec<T>(as<Acc<T>>(scale.factors)[row / scale.rows_per_factor]);
}

template <bool kGamma, bool kExtra, class T>
void scale_rows(bool stream, const T* x, const RowScale& scale, const T* extra, T* y, int64_t first,
                int64_t rows, int64_t h) {
  const auto* const gamma = as<Acc<T>>(scale.gamma);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec<T> factor = factor_of<T>(scale, first + r);
    const T* const row = x + r * h;
    const T* const more = kExtra ? extra + r * h : row;
    const auto scaled = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
      auto value = load(row + i, lanes);
      if constexpr (kGamma) value = value * load_acc<T>(gamma + i, lanes);
      value = value * decltype(value)(factor);
      if constexpr (kExtra) value = value + load(more + i, lanes);
      return value;
    };
    write_row(y + r * h, h, stream, scaled);
  }
}

namespace entry {

void row_scale(DType dtype, const void* x, const RowScale& scale, const void* extra, void* y,
               int64_t first, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_streaming(as<T>(y), rows, h, [&](bool stream) {
      const bool has_gamma = scale.gamma != nullptr;
      const auto pass =
          extra != nullptr ? (has_gamma ? scale_rows<true, true, T> : scale_rows<false, true, T>)
                           : (has_gamma ? scale_rows<true, false, T> : scale_rows<false, false, T>);
      pass(stream, as<T>(x), scale, as<T>(extra), as<T>(y), first, rows, h);
    });
  });
}

void row_scale_backward(DType dtype, const void* grad_y, const void* x, const RowScale& scale,
                        void* grad_x, void* grad_gamma, int64_t first, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto* const gamma = as<Acc<T>>(scale.gamma);
    ColumnSums<Acc<T>> sums(grad_gamma, h);
    Acc<T>* const sum = sums.group();
    with_streaming(as<T>(grad_x), rows, h, [&](bool stream) {
      for (int64_t r = 0; r < rows; ++r) {
        const Vec<T> factor = factor_of<T>(scale, first + r);
        const T *const grad = as<T>(grad_y) + r * h, *const row = as<T>(x) + r * h;
        const auto scaled = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          auto value = load(grad + i, lanes);
          value = value * decltype(value)(factor);
          store_acc(sum + i, load_acc<T>(sum + i, lanes) + value * load(row + i, lanes), lanes);
          return value * load_acc<T>(gamma + i, lanes);
        };
        write_row(as<T>(grad_x) + r * h, h, stream, scaled);
        sums.end_row();
      }
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(row_scale, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(row_scale_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
