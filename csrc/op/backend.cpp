#include "op/backend.h"

namespace transformer_ops::cuda {
namespace {
const Backend* current = nullptr;
}

const Backend* backend() { return current; }
void set_backend(const Backend* backend) { current = backend; }

}  // namespace transformer_ops::cuda
