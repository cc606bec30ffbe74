// Multiplies rows by a vector, and each row by a number.
#include "kernels/row_scale.h"

#include "kernels/cuda/columns.h"

namespace transformer_ops::cuda {
namespace {

template <class T, int N>
struct ScaledColumn {
  int64_t first;
  Pack<Acc<T>, N> gamma;

  __device__ __forceinline__ ScaledColumn(const Vector& vector, int64_t first) : first(first) {
    if (vector.data != nullptr) {
      gamma = elements<true, N, Acc<T>>(vector, first);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) gamma[j] = Acc<T>(1);
    }
  }
  TRANSFORMER_OPS_GEOMETRY int64_t sum(int k) const { return first + k; }
};

template <class T, int N>
struct ScaledRows {
  using Column = ScaledColumn<T, N>;
  // Backward also needs these:
  using Sum = Acc<T>;
  static constexpr int kSums = N;
  static constexpr int kPacksAcross = kPacksOf512Bytes<T, N>;
  static constexpr int kRows = N == 1 ? 4 : 2;

  const T* x;
  RowScale scale;
  int64_t h;

  __device__ __forceinline__ Column column(int64_t pack) const { return {scale.gamma, pack * N}; }
  __device__ __forceinline__ Acc<T> factor(int64_t row) const {
    if (scale.factors == nullptr) return Acc<T>(1);
    return static_cast<const Acc<T>*>(scale.factors)[row / scale.rows_per_factor];
  }
};

template <class T, int N>
struct Forward : ScaledRows<T, N> {
  struct Loads {
    Pack<T, N> x, extra;
    Acc<T> factor;
  };

  const T* extra;
  T* y;

  __device__ __forceinline__ Loads load(const ScaledColumn<T, N>& column, int64_t row) const {
    const int64_t i = row * this->h + column.first;
    Loads loads = {cuda::load<true, N>(this->x + i), {}, this->factor(row)};
    if (extra != nullptr) loads.extra = cuda::load<true, N>(extra + i);
    return loads;
  }
  template <class Add>
  __device__ __forceinline__ void finish(const ScaledColumn<T, N>& column, int64_t row,
                                         const Loads& loads, const Add&) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Acc<T> value = to_acc(loads.x[j]) * column.gamma[j] * loads.factor;
      if (extra != nullptr) value += to_acc(loads.extra[j]);
      out[j] = round_to<T>(value);
    }
    store<true, N>(y + row * this->h + column.first, out);
  }
};

template <class T, int N>
struct Backward : ScaledRows<T, N> {
  struct Loads {
    Pack<T, N> grad, x;
    Acc<T> factor;
  };

  const T* grad_y;
  T* grad_x;

  __device__ __forceinline__ Loads load(const ScaledColumn<T, N>& column, int64_t row) const {
    const int64_t i = row * this->h + column.first;
    return {cuda::load<true, N>(grad_y + i), cuda::load<true, N>(this->x + i), this->factor(row)};
  }
  template <class Add>
  __device__ __forceinline__ void finish(const ScaledColumn<T, N>& column, int64_t row,
                                         const Loads& loads, const Add& add) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Acc<T> grad = to_acc(loads.grad[j]) * loads.factor;
      add(j, grad * to_acc(loads.x[j]));
      out[j] = round_to<T>(grad * column.gamma[j]);
    }
    store<true, N>(grad_x + row * this->h + column.first, out);
  }
};

namespace entry {

void row_scale(Stream stream, DType dtype, const void* x, const RowScale& scale, const void* extra,
               void* y, int64_t rows, int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto n) {
      constexpr int N = decltype(n)::value;
      const Forward<T, N> body{
          {static_cast<const T*>(x), scale, h}, static_cast<const T*>(extra), static_cast<T*>(y)};
      for_rows(stream, body, rows, h / N);
    };
    with_packs<kVector<T>>(aligned16(x, scale.gamma.data, extra, y), run, h);
  });
}

void row_scale_backward(Stream stream, DType dtype, const void* grad_y, const void* x,
                        const RowScale& scale, void* grad_x, const ColumnSum& grad_gamma,
                        int64_t rows, int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto n) {
      constexpr int N = decltype(n)::value;
      const Backward<T, N> body{{static_cast<const T*>(x), scale, h},
                                static_cast<const T*>(grad_y),
                                static_cast<T*>(grad_x)};
      for_columns(stream, body, grad_gamma, rows, h / N, h);
    };
    with_packs<kVector<T>>(aligned16(grad_y, x, scale.gamma.data, grad_x), run, h);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(row_scale, "cuda");
TRANSFORMER_OPS_KERNEL(row_scale_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
