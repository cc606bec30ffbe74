// Code shared by Dropout and the fused ops that contain it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "kernels/cuda.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises if p is not a probability.
void check_probability(const Checks& check, double p);

// output = dropout(input). A null mask is not written.
void drop_cpu(const Tensor& input, double p, const Tensor& output, const Tensor* mask);
void drop_cuda(const Tensor& input, double p, const Tensor& output, const Tensor* mask);
// output = input / (1 - p) where the bit mask keeps it, else 0. They may be one tensor.
void apply_mask_cpu(const Tensor& input, const Tensor& mask, double p, const Tensor& output);
void apply_mask_cuda(const Tensor& input, const Tensor& mask, double p, const Tensor& output);
// The same in plain ATen: zero where dropped, even if the value is NaN or infinite.
Tensor dropout_decomposed(const Tensor& tensor, const Tensor& mask, double p);

// Draws 64 bits from torch's generator.
uint64_t draw_seed();
// The key of one call's mask. It is drawn from torch's generator only if p requires random numbers.
uint64_t draw_seed(double p);
// The same on CUDA.
cuda::Philox draw_philox(c10::Device device, double p);

}  // namespace transformer_ops
