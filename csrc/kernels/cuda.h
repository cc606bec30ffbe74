// What slots of CUDA kernels are declared with: kernels on raw, contiguous device memory. Free of
// CUDA's headers, so that the ops that call them compile in every build.
//
// Each is queued on its stream and never waits for it. "acc" is the compute type: float, or double
// for Float64. Statistics and partial sums are acc arrays. Pointers need no alignment beyond that
// of their elements, 16 bytes are faster. An output may be exactly one of the inputs of the same
// shape; any other overlap is not allowed. Rows, widths and counts may exceed 2^31 elements.
// What goes wrong at a launch is a std::runtime_error. The CPU slots, beside them, say in more
// detail what each computes.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"
#include "kernels/types.h"

namespace transformer_ops::cuda {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

// Of the backend that is loaded; raises where there is none.
const kernel::Row& find(const char* slot);

template <class Signature>
using Kernel = kernel::Kernel<Signature, find>;

using Stream = void*;  // a cudaStream_t of the current device

// A parameter vector in a dtype of its own, each element plus `add`. Null data: absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::Float32;
  double add = 0.0;
};

// The gradient of a parameter vector, in a dtype of its own. Null data: not wanted.
struct Gradient {
  void* data = nullptr;
  DType dtype = DType::Float32;
};

// Random numbers of torch's CUDA generator: seed and offset, or, while a graph is captured, where
// each replay finds them.
struct Philox {
  uint64_t seed = 0;
  uint64_t offset = 0;  // added to *offset_at in a graph
  const int64_t* seed_at = nullptr;
  const int64_t* offset_at = nullptr;
};

}  // namespace transformer_ops::cuda
