// RMS norm and L2 normalization, row by row: rstd = 1 / sqrt(sum(x^2) / divisor + eps).
#include "kernels/norm.h"

#include "norm_rows.h"

namespace transformer_ops::cpu {
namespace {

template <bool kGamma, class T>
void root_norm_rows(bool stream, const T* x, const Acc<T>* gamma, double divisor, double eps, T* y,
                    Acc<T>* rstd, int64_t rows, int64_t h) {
  using A = Acc<T>;
  using V = Vec<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * h;
    const double squares = row_sum<T>(
        h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto v = load(row + i, any_order(lanes));
          return v * v;
        });
    const auto s = reciprocal_root<A>(squares / divisor + eps);
    const auto normalize = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
      const auto n = load(row + i, lanes) * V(s);
      if constexpr (kGamma) return n * load_acc<T>(gamma + i, lanes);
      return n;
    };
    write_row(y + r * h, h, stream, normalize, row);
    rstd[r] = s;
  }
}

// With n = x rstd and g = grad_y gamma: grad_x = rstd (g - n sum(g n) / divisor) + residual.
template <bool kGamma, class T, class Extra>
void root_norm_backward_rows(bool stream, const T* grad_y, const T* x, const Acc<T>* rstd,
                             const Acc<T>* gamma, double divisor, Extra residual,
                             typename Extra::Element* grad_x, void* grad_gamma, int64_t rows,
                             int64_t h) {
  using A = Acc<T>;
  using V = Vec<T>;
  ColumnSums<A, AnyOrderOf<T>> gamma_sums(grad_gamma, h);
  A* gamma_sum = gamma_sums.group();
  const InAnyOrder<T> ordered(gamma, h);
  const Weight<kGamma, T> weight{ordered.data()};
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    const int count = static_cast<int>(smaller(kRowsAtOnce, rows - r));
    A projection[kRowsAtOnce];
    for (int k = 0; k < count; ++k) {
      const T *g = grad_y + (r + k) * h, *row = x + (r + k) * h;
      const V s(rstd[r + k]);
      const double sum = row_sum<T>(
          h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
            return weight.times(load(g + i, any_order(lanes)), i, lanes) *
                   (load(row + i, any_order(lanes)) * s);
          });
      projection[k] = static_cast<A>(sum / divisor);
    }
    for_wide_vectors<T>(
        h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          auto sum_gn = load_acc<T>(gamma_sum + i, lanes);
          for (int k = 0; k < count; ++k) {
            const int64_t at = (r + k) * h + i;
            prefetch<Wide<T>::kLanes>(grad_y + at + count * h);
            prefetch<Wide<T>::kLanes>(x + at + count * h);
            const auto grad = load(grad_y + at, any_order(lanes));
            const auto n = load(x + at, any_order(lanes)) * V(rstd[r + k]);
            if constexpr (kGamma) sum_gn = sum_gn + grad * n;
            const auto along = n * V(projection[k]);
            const auto change = weight.times_plus(grad, -along, i, lanes);
            store_gradient<T>(residual, grad_x, at, change * V(rstd[r + k]), any_order(lanes),
                              stream);
          }
          if constexpr (kGamma) store_acc(gamma_sum + i, sum_gn, lanes);
        });
    gamma_sums.end_rows(count);
  }
}

namespace entry {

void root_norm_forward(DType dtype, const void* x, const void* gamma, double divisor, double eps,
                       void* y, void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_streaming(as<T>(y), rows, h, [&](bool stream) {
      with_present(gamma, nullptr, [&]<class Gamma>(Gamma, auto) {
        root_norm_rows<Gamma::kValue>(stream, as<T>(x), as<A>(gamma), divisor, eps, as<T>(y),
                                      as<A>(rstd), rows, h);
      });
    });
  });
}

void root_norm_backward(DType dtype, const void* grad_y, const void* x, const void* rstd,
                        const void* gamma, double divisor, void* grad_x, void* grad_gamma,
                        int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_streaming(as<T>(grad_x), rows, h, [&](bool stream) {
      with_present(gamma, nullptr, [&]<class Gamma>(Gamma, auto) {
        root_norm_backward_rows<Gamma::kValue>(stream, as<T>(grad_y), as<T>(x), as<A>(rstd),
                                               as<A>(gamma), divisor, NoResidual<T>(),
                                               as<T>(grad_x), grad_gamma, rows, h);
      });
    });
  });
}

void rms_norm_forward(DType dtype, const void* x, const void* gamma, double eps, void* y,
                      void* rstd, int64_t rows, int64_t h) {
  root_norm_forward(dtype, x, gamma, static_cast<double>(h), eps, y, rstd, rows, h);
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

void rms_norm_backward(DType dtype, const void* grad_y, const void* x, const void* rstd,
                       const void* gamma, void* grad_x, void* grad_gamma, int64_t rows, int64_t h) {
  root_norm_backward(dtype, grad_y, x, rstd, gamma, static_cast<double>(h), grad_x, grad_gamma,
                     rows, h);
}

void rms_norm_residual_backward(DType dtype, bool wide, const void* grad_y, const void* x,
                                const void* rstd, const void* gamma, const void* residual,
                                void* grad_x, void* grad_gamma, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_residual<T>(residual, wide, [&]<class R>(Residual<R> extra) {
      using A = Acc<T>;
      with_streaming(as<R>(grad_x), rows, h, [&](bool stream) {
        with_present(gamma, nullptr, [&]<class Gamma>(Gamma, auto) {
          root_norm_backward_rows<Gamma::kValue>(stream, as<T>(grad_y), as<T>(x), as<A>(rstd),
                                                 as<A>(gamma), static_cast<double>(h), extra,
                                                 as<R>(grad_x), grad_gamma, rows, h);
        });
      });
    });
  });
}

void l2_norm_forward(DType dtype, const void* x, double eps, void* y, void* rstd, int64_t rows,
                     int64_t h) {
  root_norm_forward(dtype, x, nullptr, 1.0, eps, y, rstd, rows, h);
}

void l2_norm_backward(DType dtype, const void* grad_y, const void* x, const void* rstd,
                      void* grad_x, int64_t rows, int64_t h) {
  root_norm_backward(dtype, grad_y, x, rstd, nullptr, 1.0, grad_x, nullptr, rows, h);
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(rms_norm_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(add_rms_norm_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(rms_norm_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(rms_norm_residual_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(l2_norm_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(l2_norm_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
