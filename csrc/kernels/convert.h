// Conversions to and from the compute type.
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

inline const Kernel<void(DType, const void* acc, void* out, int64_t n)> convert_from_acc{
    "convert_from_acc"};

// in + add
inline const Kernel<void(DType, const void* in, void* acc, double add, int64_t n)> convert_to_acc{
    "convert_to_acc"};

}  // namespace transformer_ops::cpu
