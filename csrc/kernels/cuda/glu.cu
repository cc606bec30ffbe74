// Gated linear units, alone and with the bias before them.
#include "kernels/cuda/glu.h"
#include "kernels/glu.h"

namespace transformer_ops::cuda {
namespace {

template <class T, int N, class Formula>
struct GluForward {
  using Column = GluColumn<N>;
  static constexpr int kRows = kGluRows<N>;
  struct Loads {
    Pack<T, N> gate, linear;
  };

  Formula formula;
  GluLayout layout;
  const T* x;
  T* y;

  __device__ __forceinline__ Column column(int64_t pack) const { return {layout, pack}; }

  __device__ __forceinline__ Loads load(const Column& column, int64_t row) const {
    const T* const from = x + row * (2 * layout.h);
    return {cuda::load<true, N>(from + column.gate), cuda::load<true, N>(from + column.linear)};
  }

  template <class Add>
  __device__ __forceinline__ void finish(const Column& column, int64_t row, const Loads& loads,
                                         const Add&) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out[j] = round_to<T>(
          to_acc(formula.forward(to_compute(loads.gate[j]), to_compute(loads.linear[j]))));
    }
    store<true, N>(y + row * layout.h + column.y, out);
  }
};

// The same for x + bias rounded to T, so that backward reads the same numbers that forward used.
template <class T, int N, class Formula>
struct BiasGluForward {
  struct Column : GluColumn<N> {
    Pack<Acc<T>, N> gate_bias, linear_bias;
  };
  using Loads = typename GluForward<T, N, Formula>::Loads;
  static constexpr int kRows = kGluRows<N>;

  GluForward<T, N, Formula> glu;
  Vector bias;
  T* kept;  // may be null

  __device__ __forceinline__ Column column(int64_t pack) const {
    return {glu.column(pack), {}, {}};
  }

  __device__ __forceinline__ void load_parameters(Column& column) const {
    column.gate_bias = elements<true, N, Acc<T>>(bias, column.gate);
    column.linear_bias = elements<true, N, Acc<T>>(bias, column.linear);
  }

  __device__ __forceinline__ Loads load(const Column& column, int64_t row) const {
    return glu.load(column, row);
  }

  template <class Add>
  __device__ __forceinline__ void finish(const Column& column, int64_t row, const Loads& loads,
                                         const Add& add) const {
    Loads sums;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums.gate[j] = round_to<T>(to_acc(loads.gate[j]) + column.gate_bias[j]);
      sums.linear[j] = round_to<T>(to_acc(loads.linear[j]) + column.linear_bias[j]);
    }
    if (kept != nullptr) {
      T* const to = kept + row * (2 * glu.layout.h);
      store<true, N>(to + column.gate, sums.gate);
      store<true, N>(to + column.linear, sums.linear);
    }
    glu.finish(column, row, sums, add);
  }
};

// Calls f(body, packs in a row of y).
template <class F>
void with_glu_forward(const Glu& glu, DType dtype, const void* x, void* y, int64_t h, bool aligned,
                      const F& f) {
  if (h == 0) return;
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    kernel::with_glu<Acc<T>>(glu, [&](auto formula) {
      const auto run = [&](auto n) {
        constexpr int N = decltype(n)::value;
        f(GluForward<T, N, decltype(formula)>{formula, glu_layout<N>(glu, h),
                                              static_cast<const T*>(x), static_cast<T*>(y)},
          h / N);
      };
      with_packs<kVector<T>>(aligned && aligned16(x, y), run, h, glu.interleave);
    });
  });
}

template <class T, int N, class Formula>
void bias_glu(Stream stream, const GluForward<T, N, Formula>& body, const Vector& bias, void* kept,
              int64_t rows, int64_t packs) {
  const BiasGluForward<T, N, Formula> with_bias{body, bias, static_cast<T*>(kept)};
  for_rows(stream, with_bias, rows, packs);
}

namespace entry {

void glu_forward(Stream stream, const Glu& glu, DType dtype, const void* x, void* y, int64_t rows,
                 int64_t h) {
  with_glu_forward(glu, dtype, x, y, h, true,
                   [&](const auto& body, int64_t packs) { for_rows(stream, body, rows, packs); });
}

void bias_glu_forward(Stream stream, const Glu& glu, DType dtype, const void* x, const Vector& bias,
                      void* kept, void* y, int64_t rows, int64_t h) {
  with_glu_forward(
      glu, dtype, x, y, h, aligned16(bias.data, kept),
      [&](const auto& body, int64_t packs) { bias_glu(stream, body, bias, kept, rows, packs); });
}

void glu_backward(Stream stream, const Glu& glu, DType dtype, const void* grad_y, const void* x,
                  void* grad_x, int64_t rows, int64_t h) {
  with_glu_backward(glu, dtype, grad_y, x, grad_x, h,
                    [&](const auto& body, int64_t packs) { for_rows(stream, body, rows, packs); });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(glu_forward, "cuda");
TRANSFORMER_OPS_KERNEL(bias_glu_forward, "cuda");
TRANSFORMER_OPS_KERNEL(glu_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
