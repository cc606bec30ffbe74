// What Dropout and the fused ops that contain one share.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "kernels/cuda.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises where p is no probability.
void check_probability(const Checks& check, double p);

// The gradient by a mask's bits: zero where dropped, whatever the value.
Tensor dropout_decomposed(const Tensor& tensor, const Tensor& mask, double p);

// 64 bits of torch's generator.
uint64_t draw_seed();
// The key of one call's mask; draws from torch's generator only where p needs it.
uint64_t draw_seed(double p);
// The same on CUDA.
cuda::Philox draw_philox(c10::Device device, double p);

}  // namespace transformer_ops
