// Numbers of any dtype in the host's memory.
#pragma once

#if defined(TRANSFORMER_OPS_EMULATED)
#include "emulate.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstring>

#include "kernels/types.h"

namespace transformer_ops::cuda {

inline int64_t size_of(kernel::DType dtype) {
  return dtype == kernel::DType::Float64 ? 8 : dtype == kernel::DType::Float32 ? 4 : 2;
}

// Addresses need no alignment.
inline double get_number(kernel::DType dtype, const void* data, int64_t i) {
  const char* const from = static_cast<const char*>(data) + i * size_of(dtype);
  const auto as = [from](auto value) {
    std::memcpy(&value, from, sizeof(value));
    return value;
  };
  switch (dtype) {
    case kernel::DType::Float16:
      return __half2float(as(__half()));
    case kernel::DType::BFloat16:
      return __bfloat162float(as(__nv_bfloat16()));
    case kernel::DType::Float32:
      return as(float());
    case kernel::DType::Float64:
      break;
  }
  return as(double());
}

// Rounds to nearest even; 16-bit types go through float.
inline void set_number(kernel::DType dtype, void* data, int64_t i, double value) {
  char* const to = static_cast<char*>(data) + i * size_of(dtype);
  const auto store = [to](auto rounded) { std::memcpy(to, &rounded, sizeof(rounded)); };
  switch (dtype) {
    case kernel::DType::Float16:
      return store(__float2half_rn(static_cast<float>(value)));
    case kernel::DType::BFloat16:
      return store(__float2bfloat16_rn(static_cast<float>(value)));
    case kernel::DType::Float32:
      return store(static_cast<float>(value));
    case kernel::DType::Float64:
      return store(value);
  }
}

}  // namespace transformer_ops::cuda
