// Tensors on recycled memory: what ops, fusions and the executor make their results with.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory/pool.h"

namespace transformer_ops {

// A contiguous CPU tensor, contents undefined. Its memory goes back to the pool with the last
// reference to its storage, in whichever thread.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

// A contiguous tensor on any device: by empty_cpu, or by the device's caching allocator.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// Where a backward writes the gradient of its input, which it makes on the way to all others:
// `gradient` itself if it is wanted, else memory of that dtype and of the sizes of `input`.
at::Tensor memory_for(const at::Tensor& gradient, bool wanted, const at::Tensor& input);

// Is `tensor` all that is left of memory that empty() gave? Then nobody sees what is written to it.
bool is_last_reference(const at::Tensor& tensor);

// The tensor itself where it is contiguous, else a copy.
at::Tensor contiguous(const at::Tensor& tensor);

// The next first result that a body fills on this thread goes into this tensor, where that has the
// result's sizes, dtype and device and no gaps; an undefined one takes that back.
void write_next_result_into(at::Tensor buffer);
// That tensor, once; undefined where there is none, or it does not fit.
at::Tensor take_result_buffer(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// Of the process; it outlives every tensor. Its first limit is TRANSFORMER_OPS_POOL_LIMIT.
memory::Pool& pool();

}  // namespace transformer_ops
