// Is there a CUDA backend? What it holds only the bodies know (wrappers/cuda.h).
#pragma once

namespace transformer_ops::cuda {

struct Backend;

// Null in a CPU build.
const Backend* backend();
void set_backend(const Backend* backend);

}  // namespace transformer_ops::cuda
