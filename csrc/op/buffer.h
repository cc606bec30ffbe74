// Tensors in recycled memory. Ops, fusions and the executor allocate their results here.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory/pool.h"

namespace transformer_ops {

// Allocates a contiguous CPU tensor with undefined contents. Its memory returns to the pool with
// the last reference to its storage, from any thread.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

// Allocates a contiguous tensor on any device, with empty_cpu or the device's caching allocator.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// The buffer for the gradient of an input that a backward needs to compute its other gradients:
// `gradient` if it is wanted, else new memory of that dtype and of the sizes of `input`.
at::Tensor memory_for(const at::Tensor& gradient, bool wanted, const at::Tensor& input);

// Is `tensor` the only reference to memory from empty()? If so, writing to it is not observable.
bool is_last_reference(const at::Tensor& tensor);

// Returns the tensor itself if it is contiguous, else a copy.
at::Tensor contiguous(const at::Tensor& tensor);

// Sets the buffer for the next first result that a kernel wrapper fills on this thread. The result
// uses it if sizes, dtype and device match and it is contiguous. An undefined tensor unsets it.
void write_next_result_into(at::Tensor buffer);
// Takes the buffer that was set. Returns an undefined tensor if none is set, or if it does not fit.
at::Tensor take_result_buffer(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// The pool of the process, which outlives every tensor. TRANSFORMER_OPS_POOL_LIMIT sets its first
// limit.
memory::Pool& pool();

}  // namespace transformer_ops
