// Layer norm, RMS norm and L2 normalization, row by row.
#pragma once

#include "../math.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

// Sum of f(i) over a row: a vector of partial sums inside a block, double across blocks, so that
// long rows stay accurate.
template <class A, class F>
TRANSFORMER_OPS_INLINE double row_sum(int64_t h, F f) {
  double total = 0;
  for (int64_t start = 0; start < h; start += kBlock) {
    const int64_t end = smaller(start + kBlock, h);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += f(i);
    total += sum;
  }
  return total;
}

// Two sums at once: f(i, first, second) adds to both.
struct TwoSums {
  double first = 0, second = 0;
};

template <class A, class F>
TRANSFORMER_OPS_INLINE TwoSums row_two_sums(int64_t h, F f) {
  TwoSums total;
  for (int64_t start = 0; start < h; start += kBlock) {
    const int64_t end = smaller(start + kBlock, h);
    A first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = start; i < end; ++i) f(i, first, second);
    total.first += first;
    total.second += second;
  }
  return total;
}

// y[i] = f(i). Meanwhile the next rows of the inputs are fetched: without it, a kernel that goes
// over a row several times would alternate between waiting for memory and computing.
template <class T, class F, class... Rows>
TRANSFORMER_OPS_INLINE void write_row(T* y, int64_t h, F f, const Rows&... inputs) {
  constexpr int64_t kStep = 256;
  alignas(64) Acc<T> buffer[kStep];
  for (int64_t start = 0; start < h; start += kStep) {
    const int64_t count = smaller(kStep, h - start);
    (inputs.prefetch_next(start, count), ...);
    Acc<T>* staged = staging(y + start, buffer);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) staged[i] = f(start + i);
    store(staged, y + start, count);
  }
}

template <class A>
A reciprocal_root(double x) {
  return static_cast<A>(1.0 / math::sqrt(x));
}

// ---- layer norm ----

template <class T, bool kGamma, bool kBeta>
void layer_norm_rows(const T* x, const Acc<T>* gamma, const Acc<T>* beta, double eps, T* y,
                     Acc<T>* mean, Acc<T>* rstd, int64_t rows, int64_t h) {
  using A = Acc<T>;
  Row<T> row(h);
  const auto size = static_cast<double>(h);
  for (int64_t r = 0; r < rows; ++r) {
    const A* v = row.load(x + r * h);
    const auto m = static_cast<A>(row_sum<A>(h, [=](int64_t i) { return v[i]; }) / size);
    const double squares = row_sum<A>(h, [=](int64_t i) { return (v[i] - m) * (v[i] - m); });
    const auto s = reciprocal_root<A>(squares / size + eps);
    write_row(
        y + r * h, h,
        [=](int64_t i) {
          A out = (v[i] - m) * s;
          if constexpr (kGamma) out = out * gamma[i];
          if constexpr (kBeta) out = out + beta[i];
          return out;
        },
        row);
    mean[r] = m;
    rstd[r] = s;
  }
}

void layer_norm_forward(DType dtype, const void* x, const void* gamma, const void* beta, double eps,
                        void* y, void* mean, void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    auto* run =
        gamma != nullptr
            ? (beta != nullptr ? layer_norm_rows<T, true, true> : layer_norm_rows<T, true, false>)
            : (beta != nullptr ? layer_norm_rows<T, false, true>
                               : layer_norm_rows<T, false, false>);
    run(as<T>(x), as<A>(gamma), as<A>(beta), eps, as<T>(y), as<A>(mean), as<A>(rstd), rows, h);
  });
}

// What backward adds to grad_x: rows of the residual's gradient, which grad_x then has the type of;
// or nothing.
template <class R>
class Residual : public Row<R> {
 public:
  using Element = R;
  static constexpr bool kPresent = true;
  using Row<R>::Row;
};

template <class T>
struct NoResidual {
  using Element = T;
  static constexpr bool kPresent = false;
  explicit NoResidual(int64_t) {}
  static const Acc<T>* load(const T*) { return nullptr; }
  void prefetch_next(int64_t, int64_t) const {}
};

// With n = (x - mean) rstd and g = grad_y gamma: grad_gamma = sum grad_y n, grad_beta = sum grad_y,
// grad_x = rstd (g - mean(g) - n mean(g n)) + residual.
template <class T, bool kGamma, class Extra>
void layer_norm_backward_rows(const T* grad_y, const T* x, const Acc<T>* mean, const Acc<T>* rstd,
                              const Acc<T>* gamma, const typename Extra::Element* residual,
                              typename Extra::Element* grad_x, void* grad_gamma, void* grad_beta,
                              int64_t rows, int64_t h) {
  using A = Acc<T>;
  Row<T> grad_row(h), x_row(h);
  Extra residual_row(h);
  ColumnSums<A> gamma_sums(grad_gamma, h), beta_sums(grad_beta, h);
  A* gamma_sum = gamma_sums.group();
  A* beta_sum = beta_sums.group();
  for (int64_t r = 0; r < rows; ++r) {
    const A* g = grad_row.load(grad_y + r * h);
    const A* v = x_row.load(x + r * h);
    const A* e = residual_row.load(residual + (Extra::kPresent ? r * h : 0));
    const A m = mean[r], s = rstd[r];
    const TwoSums sums = row_two_sums<A>(h, [=](int64_t i, A& first, A& second) {
      const A weighted = kGamma ? g[i] * gamma[i] : g[i];
      first += weighted;
      second += weighted * ((v[i] - m) * s);
    });
    const auto mean_g = static_cast<A>(sums.first / static_cast<double>(h));
    const auto mean_gn = static_cast<A>(sums.second / static_cast<double>(h));
    write_row(
        grad_x + r * h, h,
        [=](int64_t i) {
          const A n = (v[i] - m) * s;
          const A grad = g[i];
          gamma_sum[i] += grad * n;
          beta_sum[i] += grad;
          const A weighted = kGamma ? grad * gamma[i] : grad;
          const A out = s * ((weighted - mean_g) - n * mean_gn);
          return Extra::kPresent ? out + e[i] : out;
        },
        grad_row, x_row, residual_row);
    gamma_sums.end_row();
    beta_sums.end_row();
  }
}

void layer_norm_backward(DType dtype, const void* grad_y, const void* x, const void* mean,
                         const void* rstd, const void* gamma, void* grad_x, void* grad_gamma,
                         void* grad_beta, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    auto* run = gamma != nullptr ? layer_norm_backward_rows<T, true, NoResidual<T>>
                                 : layer_norm_backward_rows<T, false, NoResidual<T>>;
    run(as<T>(grad_y), as<T>(x), as<A>(mean), as<A>(rstd), as<A>(gamma), nullptr, as<T>(grad_x),
        grad_gamma, grad_beta, rows, h);
  });
}

// f(Residual of the type that residual and grad_x have): T's own, or acc.
template <class T, class F>
void with_residual(bool wide, F f) {
  if (wide) return f(Tag<Residual<Acc<T>>>());
  f(Tag<Residual<T>>());
}

void layer_norm_residual_backward(DType dtype, bool wide, const void* grad_y, const void* x,
                                  const void* mean, const void* rstd, const void* gamma,
                                  const void* residual, void* grad_x, void* grad_gamma,
                                  void* grad_beta, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_residual<T>(wide, [&]<class Extra>(Tag<Extra>) {
      using A = Acc<T>;
      using R = typename Extra::Element;
      auto* run = gamma != nullptr ? layer_norm_backward_rows<T, true, Extra>
                                   : layer_norm_backward_rows<T, false, Extra>;
      run(as<T>(grad_y), as<T>(x), as<A>(mean), as<A>(rstd), as<A>(gamma), as<R>(residual),
          as<R>(grad_x), grad_gamma, grad_beta, rows, h);
    });
  });
}

// ---- RMS norm and L2 normalization: rstd = 1 / sqrt(sum(x^2) / divisor + eps) ----

template <class T, bool kGamma>
void root_norm_rows(const T* x, const Acc<T>* gamma, double divisor, double eps, T* y, Acc<T>* rstd,
                    int64_t rows, int64_t h) {
  using A = Acc<T>;
  Row<T> row(h);
  for (int64_t r = 0; r < rows; ++r) {
    const A* v = row.load(x + r * h);
    const double squares = row_sum<A>(h, [=](int64_t i) { return v[i] * v[i]; });
    const auto s = reciprocal_root<A>(squares / divisor + eps);
    write_row(
        y + r * h, h,
        [=](int64_t i) {
          const A n = v[i] * s;
          return kGamma ? n * gamma[i] : n;
        },
        row);
    rstd[r] = s;
  }
}

// With n = x rstd and g = grad_y gamma: grad_x = rstd (g - n sum(g n) / divisor) + residual.
template <class T, bool kGamma, class Extra>
void root_norm_backward_rows(const T* grad_y, const T* x, const Acc<T>* rstd, const Acc<T>* gamma,
                             double divisor, const typename Extra::Element* residual,
                             typename Extra::Element* grad_x, void* grad_gamma, int64_t rows,
                             int64_t h) {
  using A = Acc<T>;
  Row<T> grad_row(h), x_row(h);
  Extra residual_row(h);
  ColumnSums<A> gamma_sums(grad_gamma, h);
  A* gamma_sum = gamma_sums.group();
  for (int64_t r = 0; r < rows; ++r) {
    const A* g = grad_row.load(grad_y + r * h);
    const A* v = x_row.load(x + r * h);
    const A* e = residual_row.load(residual + (Extra::kPresent ? r * h : 0));
    const A s = rstd[r];
    const double sum = row_sum<A>(h, [=](int64_t i) {
      const A weighted = kGamma ? g[i] * gamma[i] : g[i];
      return weighted * (v[i] * s);
    });
    const auto projection = static_cast<A>(sum / divisor);
    write_row(
        grad_x + r * h, h,
        [=](int64_t i) {
          const A n = v[i] * s;
          const A grad = g[i];
          if constexpr (kGamma) gamma_sum[i] += grad * n;
          const A out = s * ((kGamma ? grad * gamma[i] : grad) - n * projection);
          return Extra::kPresent ? out + e[i] : out;
        },
        grad_row, x_row, residual_row);
    if constexpr (kGamma) gamma_sums.end_row();
  }
}

void rms_norm_forward(DType dtype, const void* x, const void* gamma, double eps, void* y,
                      void* rstd, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    auto* run = gamma != nullptr ? root_norm_rows<T, true> : root_norm_rows<T, false>;
    run(as<T>(x), as<A>(gamma), static_cast<double>(h), eps, as<T>(y), as<A>(rstd), rows, h);
  });
}

void rms_norm_backward(DType dtype, const void* grad_y, const void* x, const void* rstd,
                       const void* gamma, void* grad_x, void* grad_gamma, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    auto* run = gamma != nullptr ? root_norm_backward_rows<T, true, NoResidual<T>>
                                 : root_norm_backward_rows<T, false, NoResidual<T>>;
    run(as<T>(grad_y), as<T>(x), as<A>(rstd), as<A>(gamma), static_cast<double>(h), nullptr,
        as<T>(grad_x), grad_gamma, rows, h);
  });
}

void rms_norm_residual_backward(DType dtype, bool wide, const void* grad_y, const void* x,
                                const void* rstd, const void* gamma, const void* residual,
                                void* grad_x, void* grad_gamma, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_residual<T>(wide, [&]<class Extra>(Tag<Extra>) {
      using A = Acc<T>;
      using R = typename Extra::Element;
      auto* run = gamma != nullptr ? root_norm_backward_rows<T, true, Extra>
                                   : root_norm_backward_rows<T, false, Extra>;
      run(as<T>(grad_y), as<T>(x), as<A>(rstd), as<A>(gamma), static_cast<double>(h),
          as<R>(residual), as<R>(grad_x), grad_gamma, rows, h);
    });
  });
}

void l2_norm_forward(DType dtype, const void* x, double eps, void* y, void* rstd, int64_t rows,
                     int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    root_norm_rows<T, false>(as<T>(x), nullptr, 1.0, eps, as<T>(y), as<Acc<T>>(rstd), rows, h);
  });
}

void l2_norm_backward(DType dtype, const void* grad_y, const void* x, const void* rstd,
                      void* grad_x, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    root_norm_backward_rows<T, false, NoResidual<T>>(as<T>(grad_y), as<T>(x), as<Acc<T>>(rstd),
                                                     nullptr, 1.0, nullptr, as<T>(grad_x), nullptr,
                                                     rows, h);
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
