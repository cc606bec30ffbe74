// The bias gradient: the sum over rows, alone and in one pass with the gradient of the op after it.
#include "kernels/choose.h"
#include "kernels/cuda/bits.h"
#include "kernels/cuda/columns.h"
#include "kernels/cuda/compute.h"
#include "kernels/random.h"

namespace transformer_ops::cuda {
namespace {

// Single elements are small, so a thread has more of them in flight.
template <int N>
constexpr int kBiasRows = N == 1 ? 8 : 4;

struct PackColumn {
  int64_t first;

  TRANSFORMER_OPS_GEOMETRY int64_t sum(int k) const { return first + k; }
};

template <class T, int N>
struct BiasAdd {
  struct Column {
    int64_t first;
    Pack<Acc<T>, N> bias;
  };
  using Loads = Pack<T, N>;
  static constexpr int kRows = kBiasRows<N>;

  const T* x;
  Vector bias;
  T* y;
  int64_t h;

  __device__ __forceinline__ Column column(int64_t pack) const { return {pack * N, {}}; }
  __device__ __forceinline__ void load_parameters(Column& column) const {
    column.bias = elements<true, N, Acc<T>>(bias, column.first);
  }
  __device__ __forceinline__ Loads load(const Column& column, int64_t row) const {
    return cuda::load<true, N>(x + row * h + column.first);
  }
  template <class Add>
  __device__ __forceinline__ void finish(const Column& column, int64_t row, const Loads& loads,
                                         const Add&) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = round_to<T>(to_acc(loads[j]) + column.bias[j]);
    store<true, N>(y + row * h + column.first, out);
  }
};

// The common part of bodies with one sum for each column.
template <class T, int N>
struct Summed {
  using Column = PackColumn;
  using Sum = Acc<T>;
  static constexpr int kSums = N;
  static constexpr int kPacksAcross = kPacksOf512Bytes<T, N>;

  __device__ __forceinline__ Column column(int64_t pack) const { return {pack * N}; }
};

template <class T, int N>
struct SumOnly : Summed<T, N> {
  using Loads = Pack<T, N>;
  static constexpr int kRows = kBiasRows<N>;

  const T* x;
  int64_t h;

  SumOnly(const void* x, int64_t h) : x(static_cast<const T*>(x)), h(h) {}

  __device__ __forceinline__ Loads load(const PackColumn& column, int64_t row) const {
    return cuda::load<true, N>(x + row * h + column.first);
  }
  template <class Add>
  __device__ __forceinline__ void finish(const PackColumn&, int64_t, const Loads& loads,
                                         const Add& add) const {
#pragma unroll
    for (int j = 0; j < N; ++j) add(j, to_acc(loads[j]));
  }
};

template <class T, int N, class Formula>
struct ActivationBackward : Summed<T, N> {
  struct Loads {
    Pack<T, N> grad, x;
  };
  static constexpr int kRows = N == 1 ? 4 : 2;

  const T *grad_y, *x;
  T* grad_x;
  int64_t h;

  ActivationBackward(const void* grad_y, const void* x, void* grad_x, int64_t h)
      : grad_y(static_cast<const T*>(grad_y)),
        x(static_cast<const T*>(x)),
        grad_x(static_cast<T*>(grad_x)),
        h(h) {}

  __device__ __forceinline__ Loads load(const PackColumn& column, int64_t row) const {
    const int64_t i = row * h + column.first;
    return {cuda::load<true, N>(grad_y + i), cuda::load<true, N>(x + i)};
  }
  template <class Add>
  __device__ __forceinline__ void finish(const PackColumn& column, int64_t row, const Loads& loads,
                                         const Add& add) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto grad =
          to_acc(Formula().backward(to_compute(loads.grad[j]), to_compute(loads.x[j])));
      out[j] = round_to<T>(grad);
      add(j, grad);
    }
    store<true, N>(grad_x + row * h + column.first, out);
  }
};

// grad_y * scale where the mask has a bit, else 0. Packs are groups with a byte of the mask, or
// single elements.
template <class T, int N>
struct MaskedBackward : Summed<T, N> {
  static_assert(N == 1 || N == kGroup);
  struct Loads {
    Pack<T, N> grad;
    unsigned bits;
  };
  static constexpr int kRows = 4;

  const T* grad_y;
  const uint8_t* mask;
  Acc<T> scale;
  T* grad_x;
  int64_t h;

  MaskedBackward(const void* grad_y, const uint8_t* mask, double scale, void* grad_x, int64_t h)
      : grad_y(static_cast<const T*>(grad_y)),
        mask(mask),
        scale(static_cast<Acc<T>>(scale)),
        grad_x(static_cast<T*>(grad_x)),
        h(h) {}

  __device__ __forceinline__ Loads load(const PackColumn& column, int64_t row) const {
    const int64_t i = row * h + column.first;
    const unsigned byte = mask[i / kGroup];
    return {cuda::load<true, N>(grad_y + i), N == 1 ? byte >> (i % kGroup) : byte};
  }
  template <class Add>
  __device__ __forceinline__ void finish(const PackColumn& column, int64_t row, const Loads& loads,
                                         const Add& add) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Acc<T> grad = scale_where_set(to_acc(loads.grad[j]), scale, loads.bits, j);
      out[j] = round_to<T>(grad);
      add(j, grad);
    }
    store<true, N>(grad_x + row * h + column.first, out);
  }
};

void masked_bias_backward(Stream stream, DType dtype, const void* grad_y, const uint8_t* mask,
                          double scale, void* grad_x, const ColumnSum& sum, int64_t rows,
                          int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto n) {
      constexpr int N = decltype(n)::value;
      for_columns(stream, MaskedBackward<T, N>(grad_y, mask, scale, grad_x, h), sum, rows, h / N,
                  h);
    };
    with_packs<kGroup>(aligned16(grad_y, grad_x), run, h);
  });
}

namespace entry {

int64_t column_sum_parts(int64_t rows, int64_t h) { return column_parts(rows, h); }

void bias_add(Stream stream, DType dtype, const void* x, const Vector& bias, void* y, int64_t rows,
              int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto n) {
      constexpr int N = decltype(n)::value;
      const BiasAdd<T, N> body{static_cast<const T*>(x), bias, static_cast<T*>(y), h};
      for_rows(stream, body, rows, h / N);
    };
    with_packs<kVector<T>>(aligned16(x, bias.data, y), run, h);
  });
}

void column_sum(Stream stream, DType dtype, const void* x, const ColumnSum& sum, int64_t rows,
                int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto n) {
      constexpr int N = decltype(n)::value;
      for_columns(stream, SumOnly<T, N>(x, h), sum, rows, h / N, h);
    };
    with_packs<kVector<T>>(aligned16(x), run, h);
  });
}

void activation_bias_backward(Stream stream, Activation activation, DType dtype, const void* grad_y,
                              const void* x, void* grad_x, const ColumnSum& sum, int64_t rows,
                              int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    kernel::with_activation(activation, [&](auto formula) {
      const auto run = [&](auto n) {
        constexpr int N = decltype(n)::value;
        const ActivationBackward<T, N, decltype(formula)> body(grad_y, x, grad_x, h);
        for_columns(stream, body, sum, rows, h / N, h);
      };
      with_packs<kVector<T>>(aligned16(grad_y, x, grad_x), run, h);
    });
  });
}

void relu_bias_backward(Stream stream, DType dtype, const void* grad_y, const uint8_t* mask,
                        void* grad_x, const ColumnSum& sum, int64_t rows, int64_t h) {
  masked_bias_backward(stream, dtype, grad_y, mask, 1.0, grad_x, sum, rows, h);
}

void dropout_bias_backward(Stream stream, DType dtype, const void* grad_y, const uint8_t* mask,
                           double p, void* grad_x, const ColumnSum& sum, int64_t rows, int64_t h) {
  masked_bias_backward(stream, dtype, grad_y, mask, random::dropout_scale(p), grad_x, sum, rows, h);
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(column_sum_parts, "cuda");
TRANSFORMER_OPS_KERNEL(bias_add, "cuda");
TRANSFORMER_OPS_KERNEL(column_sum, "cuda");
TRANSFORMER_OPS_KERNEL(activation_bias_backward, "cuda");
TRANSFORMER_OPS_KERNEL(relu_bias_backward, "cuda");
TRANSFORMER_OPS_KERNEL(dropout_bias_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
