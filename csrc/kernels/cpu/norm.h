// Layer norm, RMS norm and L2 normalization, row by row.
#pragma once

#include "rows.h"
#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

template <class A>
A reciprocal_root(double x) {
  return static_cast<A>(1.0 / math::sqrt(x));
}

// ---- layer norm ----

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

// f(gamma is there, beta is there), as types.
template <class F>
TRANSFORMER_OPS_INLINE void with_present(const void* gamma, const void* beta, F f) {
  if (gamma == nullptr)
    return beta == nullptr ? f(Bool<false>(), Bool<false>()) : f(Bool<false>(), Bool<true>());
  return beta == nullptr ? f(Bool<true>(), Bool<false>()) : f(Bool<true>(), Bool<true>());
}

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

// Backward takes two rows at a time, so that the sums over rows are loaded and stored less often;
// with more, the second pass over them finds less in the first-level cache.
constexpr int kRowsAtOnce = 2;

// What backward adds to grad_x: rows of the residual's gradient, which grad_x then has the type of
// (T, or acc); or nothing.
template <class R>
struct Residual {
  using Element = R;
  static constexpr bool kPresent = true;
  const R* rows;
};
template <class T>
struct NoResidual {
  using Element = T;
  static constexpr bool kPresent = false;
};

template <class T, class Extra, class V, class Lanes>
TRANSFORMER_OPS_INLINE void store_gradient(Extra residual, typename Extra::Element* grad_x,
                                           int64_t at, V grad, Lanes lanes, bool stream) {
  if constexpr (!Extra::kPresent) {
    store(grad_x + at, grad, lanes, stream);
  } else if constexpr (__is_same(T, typename Extra::Element)) {
    store(grad_x + at, grad + load(residual.rows + at, lanes), lanes, stream);
  } else {
    store_acc(grad_x + at, grad + load_acc<T>(residual.rows + at, lanes), lanes);
  }
}

// gamma, or one where there is none.
template <bool kGamma, class T>
struct Weight {
  const Acc<T>* gamma;

  template <class V, class Lanes>
  TRANSFORMER_OPS_INLINE V times(V grad, int64_t i, Lanes lanes) const {
    if constexpr (kGamma) return grad * load_acc<T>(gamma + i, lanes);
    return grad;
  }
  template <class V, class Lanes>
  TRANSFORMER_OPS_INLINE V times_plus(V grad, V rest, int64_t i, Lanes lanes) const {
    if constexpr (kGamma) return fused(grad, load_acc<T>(gamma + i, lanes), rest);
    return grad + rest;
  }
};

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

// f(Residual of the type that residual and grad_x have): T's own, or acc.
template <class T, class F>
void with_residual(const void* residual, bool wide, F f) {
  if (wide) return f(Residual<Acc<T>>{as<Acc<T>>(residual)});
  f(Residual<T>{as<T>(residual)});
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

// ---- RMS norm and L2 normalization: rstd = 1 / sqrt(sum(x^2) / divisor + eps) ----

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

}  // namespace
}  // namespace transformer_ops::cpu
