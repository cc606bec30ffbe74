// Rounds rows to the nearest numbers of a format.
#include "rounding.h"

#include "kernels/quantize.h"

namespace transformer_ops::cpu {
namespace {
namespace entry {

void round_to_format(const kernel::Format& format, DType from, DType to, const void* x,
                     const TensorScale& tensor, void* out, int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  with_element(format.element, [&]<class E>(Tag<E>) {
    ToNearest rounding;
    round_rows<E>(format, from, to, x, tensor, out, 0, rows, h, rounding);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(round_to_format, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
