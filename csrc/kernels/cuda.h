// Declares slots of CUDA kernels: kernels on raw, contiguous device memory. It does not include
// CUDA's headers, so that the ops that call the kernels compile in every build.
//
// Each kernel is queued on its stream and never waits for it. "acc" is the compute type: float, or
// double for Float64. Statistics and partial sums are acc arrays. Pointers need no more alignment
// than their elements, but 16 bytes are faster. An output may be exactly one of the inputs of the
// same shape; any other overlap is not allowed. Rows, widths and counts may exceed 2^31 elements.
// An error at a launch is a std::runtime_error. The CPU slots next to these describe in more detail
// what each kernel computes.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"
#include "kernels/types.h"

namespace transformer_ops::cuda {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

// The kernel of the loaded backend; raises if there is none.
const kernel::Row& find(const char* slot);

template <class Signature>
using Kernel = kernel::Kernel<Signature, find>;

using Stream = void*;  // a cudaStream_t of the current device

// A parameter vector with its own dtype; `add` is added to each element. Null data: absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::Float32;
  double add = 0.0;
};

// The gradient of a parameter vector, with its own dtype. Null data: not wanted.
struct Gradient {
  void* data = nullptr;
  DType dtype = DType::Float32;
};

// Random numbers of torch's CUDA generator: seed and offset or, while a graph is captured, the
// addresses from which each replay reads them.
struct Philox {
  uint64_t seed = 0;
  uint64_t offset = 0;  // added to *offset_at in a graph
  const int64_t* seed_at = nullptr;
  const int64_t* offset_at = nullptr;
};

}  // namespace transformer_ops::cuda
