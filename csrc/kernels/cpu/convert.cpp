// Conversions to and from the compute type.
#include "kernels/convert.h"

#include "dtype.h"

namespace transformer_ops::cpu {
namespace {

namespace entry {

void convert_from_acc(DType dtype, const void* acc, void* out, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    if constexpr (kIsAcc<T>) {
      if (acc != out) memcpy(out, acc, static_cast<size_t>(n) * sizeof(T));
    } else {
      from_acc(as<float>(acc), as<T>(out), n);
    }
  });
}

void convert_to_acc(DType dtype, const void* in, void* acc, double add, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    Acc<T>* out = as<Acc<T>>(acc);
    const Acc<T>* values = load(as<T>(in), out, n);
    const auto addend = static_cast<Acc<T>>(add);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] + addend;
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(convert_from_acc, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(convert_to_acc, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
