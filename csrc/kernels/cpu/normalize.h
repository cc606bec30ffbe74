// The output of a norm from its statistics: no pass over the row for those.
#pragma once

#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

template <class T, bool kMean, bool kGamma, bool kBeta>
void normalize_rows(const T* x, const Acc<T>* mean, const Acc<T>* rstd, const Acc<T>* gamma,
                    const Acc<T>* beta, T* y, int64_t rows, int64_t h) {
  using A = Acc<T>;
  alignas(64) A buffer[kBlock];
  for (int64_t r = 0; r < rows; ++r) {
    const A m = kMean ? mean[r] : A(0), s = rstd[r];
    for (int64_t start = 0; start < h; start += kBlock) {
      const int64_t count = smaller(kBlock, h - start);
      const A* v = load(x + r * h + start, buffer, count);
      A* staged = staging(y + r * h + start, buffer);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        A out = kMean ? (v[i] - m) * s : v[i] * s;
        if constexpr (kGamma) out = out * gamma[start + i];
        if constexpr (kBeta) out = out + beta[start + i];
        staged[i] = out;
      }
      store(staged, y + r * h + start, count);
    }
  }
}

void normalize(DType dtype, const void* x, const void* mean, const void* rstd, const void* gamma,
               const void* beta, void* y, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    auto* run = normalize_rows<T, false, false, false>;
    if (mean != nullptr) {
      run = beta != nullptr    ? normalize_rows<T, true, true, true>
            : gamma != nullptr ? normalize_rows<T, true, true, false>
                               : normalize_rows<T, true, false, false>;
    } else if (gamma != nullptr) {
      run = normalize_rows<T, false, true, false>;
    }
    run(as<T>(x), as<A>(mean), as<A>(rstd), as<A>(gamma), as<A>(beta), as<T>(y), rows, h);
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
