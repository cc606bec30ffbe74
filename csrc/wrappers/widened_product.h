// 16-bit products on processors that have no instructions for them.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_ops {

// Should this product run in float32?
bool is_widened(const at::Tensor& left, const at::Tensor& right);

// out = beta out + scale left right in float32, rounded once.
void multiply_widened(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                      double beta, double scale);

}  // namespace transformer_ops
