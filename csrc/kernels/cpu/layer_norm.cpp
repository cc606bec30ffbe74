// Layer norm, row by row.
#include "kernels/norm.h"

#include "norm_rows.h"

namespace transformer_ops::cpu {
namespace {

template <bool kGamma, bool kBeta, class T>
void layer_norm_rows(bool stream, const T* x, const Acc<T>* gamma, const Acc<T>* beta, double eps,
                     T* y, Acc<T>* mean, Acc<T>* rstd, int64_t rows, int64_t h) {
  using A = Acc<T>;
  using V = Vec<T>;
  const auto size = static_cast<double>(h);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * h;
    const double sum = row_sum<T>(
        h, [=](int64_t i, auto lanes)
               __attribute__((always_inline)) { return load(row + i, any_order(lanes)); });
    const auto m = static_cast<A>(sum / size);
    const double squares = row_sum<T>(
        h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto d = inside(load(row + i, any_order(lanes)) - V(m), lanes);
          return d * d;
        });
    const auto s = reciprocal_root<A>(squares / size + eps);
    const auto normalize = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
      auto out = (load(row + i, lanes) - V(m)) * V(s);
      if constexpr (kGamma) out = out * load_acc<T>(gamma + i, lanes);
      if constexpr (kBeta) out = out + load_acc<T>(beta + i, lanes);
      return out;
    };
    write_row(y + r * h, h, stream, normalize, row);
    mean[r] = m;
    rstd[r] = s;
  }
}

// With n = (x - mean) rstd and g = grad_y gamma: grad_gamma = sum grad_y n, grad_beta = sum grad_y,
// grad_x = rstd (g - mean(g) - n mean(g n)) + residual.
template <bool kGamma, class T, class Extra>
void layer_norm_backward_rows(bool stream, const T* grad_y, const T* x, const Acc<T>* mean,
                              const Acc<T>* rstd, const Acc<T>* gamma, Extra residual,
                              typename Extra::Element* grad_x, void* grad_gamma, void* grad_beta,
                              int64_t rows, int64_t h) {
  using A = Acc<T>;
  using V = Vec<T>;
  ColumnSums<A, AnyOrderOf<T>> gamma_sums(grad_gamma, h), beta_sums(grad_beta, h);
  A* gamma_sum = gamma_sums.group();
  A* beta_sum = beta_sums.group();
  const InAnyOrder<T> ordered(gamma, h);
  const Weight<kGamma, T> weight{ordered.data()};
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    const int count = static_cast<int>(smaller(kRowsAtOnce, rows - r));
    A mean_g[kRowsAtOnce], mean_gn[kRowsAtOnce];
    for (int k = 0; k < count; ++k) {
      const T *g = grad_y + (r + k) * h, *row = x + (r + k) * h;
      const V m(mean[r + k]);
      const auto add = [=](int64_t i, auto lanes, auto& first, auto& second)
          __attribute__((always_inline)) {
        first = weight.times(load(g + i, any_order(lanes)), i, lanes);
        second = first * (load(row + i, any_order(lanes)) - m);
      };
      const TwoSums sums = row_two_sums<T>(h, add);
      mean_g[k] = static_cast<A>(sums.first / static_cast<double>(h));
      mean_gn[k] = static_cast<A>(sums.second * rstd[r + k] / static_cast<double>(h));
    }
    for_wide_vectors<T>(
        h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          auto sum_gn = load_acc<T>(gamma_sum + i, lanes), sum_g = load_acc<T>(beta_sum + i, lanes);
          for (int k = 0; k < count; ++k) {
            const int64_t at = (r + k) * h + i;
            prefetch<Wide<T>::kLanes>(grad_y + at + count * h);
            prefetch<Wide<T>::kLanes>(x + at + count * h);
            const auto grad = load(grad_y + at, any_order(lanes));
            const auto n = (load(x + at, any_order(lanes)) - V(mean[r + k])) * V(rstd[r + k]);
            sum_gn = sum_gn + grad * n;
            sum_g = sum_g + grad;
            const auto rest = -(n * V(mean_gn[k])) - V(mean_g[k]);
            const auto change = weight.times_plus(grad, rest, i, lanes);
            store_gradient<T>(residual, grad_x, at, change * V(rstd[r + k]), any_order(lanes),
                              stream);
          }
          store_acc(gamma_sum + i, sum_gn, lanes);
          store_acc(beta_sum + i, sum_g, lanes);
        });
    gamma_sums.end_rows(count);
    beta_sums.end_rows(count);
  }
}

namespace entry {

void layer_norm_forward(DType dtype, const void* x, const void* gamma, const void* beta, double eps,
                        void* y, void* mean, void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_streaming(as<T>(y), rows, h, [&](bool stream) {
      with_present(gamma, beta, [&]<class Gamma, class Beta>(Gamma, Beta) {
        layer_norm_rows<Gamma::kValue, Beta::kValue>(stream, as<T>(x), as<A>(gamma), as<A>(beta),
                                                     eps, as<T>(y), as<A>(mean), as<A>(rstd), rows,
                                                     h);
      });
    });
  });
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

void layer_norm_backward(DType dtype, const void* grad_y, const void* x, const void* mean,
                         const void* rstd, const void* gamma, void* grad_x, void* grad_gamma,
                         void* grad_beta, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_streaming(as<T>(grad_x), rows, h, [&](bool stream) {
      with_present(gamma, nullptr, [&]<class Gamma>(Gamma, auto) {
        layer_norm_backward_rows<Gamma::kValue>(stream, as<T>(grad_y), as<T>(x), as<A>(mean),
                                                as<A>(rstd), as<A>(gamma), NoResidual<T>(),
                                                as<T>(grad_x), grad_gamma, grad_beta, rows, h);
      });
    });
  });
}

void layer_norm_residual_backward(DType dtype, bool wide, const void* grad_y, const void* x,
                                  const void* mean, const void* rstd, const void* gamma,
                                  const void* residual, void* grad_x, void* grad_gamma,
                                  void* grad_beta, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_residual<T>(residual, wide, [&]<class R>(Residual<R> extra) {
      using A = Acc<T>;
      with_streaming(as<R>(grad_x), rows, h, [&](bool stream) {
        with_present(gamma, nullptr, [&]<class Gamma>(Gamma, auto) {
          layer_norm_backward_rows<Gamma::kValue>(stream, as<T>(grad_y), as<T>(x), as<A>(mean),
                                                  as<A>(rstd), as<A>(gamma), extra, as<R>(grad_x),
                                                  grad_gamma, grad_beta, rows, h);
        });
      });
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(layer_norm_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(add_layer_norm_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(layer_norm_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(layer_norm_residual_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
