// The CUDA backend, if the build has one. Only the kernel wrappers know its members
// (wrappers/cuda.h).
#pragma once

namespace transformer_ops::cuda {

struct Backend;

// Returns null in a CPU build.
const Backend* backend();
void set_backend(const Backend* backend);

}  // namespace transformer_ops::cuda
