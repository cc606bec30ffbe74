// Code shared by the CPU kernel wrappers: dtypes, pointers, threads, and sums over rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cpu.h"
#include "op/buffer.h"
#include "op/rows.h"
#include "wrappers/kernel_dtype.h"

namespace transformer_ops::cpu {

using transformer_ops::kernel_dtype;

// A parameter in the accumulate dtype of `like`, plus `add`. It is copied only if necessary.
at::Tensor to_accumulate(const at::Tensor& parameter, const at::Tensor& like, double add = 0.0);

}  // namespace transformer_ops::cpu
