// The slots' kernels are those of this program.
#include <stdexcept>
#include <string>

#include "kernels/cuda.h"

namespace transformer_ops::cuda {

const kernel::Row& find(const char* slot) {
  if (const auto* found = kernel::find(kernel::rows_of_this_library(), slot, "cuda")) return *found;
  throw std::runtime_error("no file fills " + std::string(slot));
}

}  // namespace transformer_ops::cuda
