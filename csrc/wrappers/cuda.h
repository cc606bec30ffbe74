// Code shared by the CUDA kernel wrappers. They are compiled in every build, but only a build with
// CUDA has a backend for them to call.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cuda.h"
#include "op/backend.h"
#include "op/buffer.h"
#include "wrappers/kernel_dtype.h"

namespace transformer_ops::cuda {

struct Backend {
  c10::DeviceType device;  // the CPU where tests emulate a GPU
  kernel::Rows kernels;
  Stream (*current_stream)(c10::Device);
  // Advances the device's torch generator by `offsets`.
  Philox (*draw)(c10::Device, uint64_t offsets);
};

inline Stream stream_of(const at::Tensor& tensor) {
  return backend()->current_stream(tensor.device());
}

inline const void* read(const at::Tensor& tensor) { return tensor.const_data_ptr(); }
inline void* write(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }

// The number of rows of the last dimension; 0 if that dimension is empty.
inline int64_t rows_of(const at::Tensor& tensor) {
  const int64_t width = tensor.size(-1);
  return width == 0 ? 0 : tensor.numel() / width;
}

inline Vector vector(const at::Tensor& parameter, double add = 0.0) {
  return {read(parameter), kernel_dtype(parameter), add};
}
inline Gradient gradient(const at::Tensor& grad) { return {write(grad), kernel_dtype(grad)}; }

}  // namespace transformer_ops::cuda
