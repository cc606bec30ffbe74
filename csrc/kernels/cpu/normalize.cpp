// The output of a norm from its statistics, without a pass to compute these.
#include "kernels/norm.h"

#include "norm_rows.h"

namespace transformer_ops::cpu {
namespace {

template <bool kMean, bool kGamma, bool kBeta, class T>
void normalize_rows(bool stream, const T* x, const Acc<T>* mean, const Acc<T>* rstd,
                    const Acc<T>* gamma, const Acc<T>* beta, T* y, int64_t rows, int64_t h) {
  using V = Vec<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * h;
    const V m(kMean ? mean[r] : Acc<T>(0)), s(rstd[r]);
    const auto normalize = [=](int64_t i, auto lanes) __attribute__((always_inline)) {
      auto out = load(row + i, lanes);
      if constexpr (kMean) out = out - m;
      out = out * s;
      if constexpr (kGamma) out = out * load_acc<T>(gamma + i, lanes);
      if constexpr (kBeta) out = out + load_acc<T>(beta + i, lanes);
      return out;
    };
    write_row(y + r * h, h, stream, normalize, row);
  }
}

namespace entry {

void normalize(DType dtype, const void* x, const void* mean, const void* rstd, const void* gamma,
               const void* beta, void* y, int64_t rows, int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    with_streaming(as<T>(y), rows, h, [&](bool stream) {
      with_present(gamma, beta, [&]<class Gamma, class Beta>(Gamma, Beta) {
        const auto run = mean != nullptr ? normalize_rows<true, Gamma::kValue, Beta::kValue, T>
                                         : normalize_rows<false, Gamma::kValue, Beta::kValue, T>;
        run(stream, as<T>(x), as<A>(mean), as<A>(rstd), as<A>(gamma), as<A>(beta), as<T>(y), rows,
            h);
      });
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(normalize, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
