#include "wrappers/cuda.h"

#include <c10/util/Exception.h>

namespace transformer_ops::cuda {

const kernel::Row& find(const char* slot) {
  const auto* const found =
      backend() == nullptr ? nullptr : kernel::find(backend()->kernels, slot, "cuda");
  TORCH_CHECK(found != nullptr, "[kernels] ", slot,
              " must be a kernel of the CUDA backend that is loaded, got ",
              backend() == nullptr ? "no backend" : "none of that name");
  return *found;
}

}  // namespace transformer_ops::cuda
