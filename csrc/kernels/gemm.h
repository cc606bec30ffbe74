// Products by cuBLASLt, row-major: D[m, n] = epilogue(alpha A[m, k] B[k, n] + beta C[m, n]).
#pragma once

#include "kernels/cuda.h"

namespace transformer_ops::cuda {

enum class Epilogue : uint8_t {
  None,
  Bias,      // . + bias[n]
  GeluBias,  // gelu_tanh(. + bias[n]); aux, where wanted, takes its argument
  ReluBias,  // max(. + bias[n], 0); aux, where wanted, takes one bit an element
  DGelu,     // . gelu_tanh'(aux); bias_gradient, where wanted, takes the column sums of D
  DRelu,     // . where the bit of aux is set; likewise
  SumA,      // bias_gradient takes the sums over k of A: m numbers
  SumB,      // bias_gradient takes the sums over k of B: n numbers
};

// How the sums over parts of k may be added up: torch's settings for float16 and bfloat16.
enum class PartialSums : uint8_t { AnyPrecision, FullPrecision, None };

struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;       // elements from row to row as stored
  bool transposed = false;  // stored as its transpose
};

struct Gemm {
  int64_t m, n, k;     // none is 0
  DType dtype;         // of A and B
  DType result_dtype;  // of C and D: dtype, or Float32
  Matrix a, b;
  const void* c = nullptr;  // may be d; read where beta is not 0
  int64_t c_stride = 0;
  void* d = nullptr;
  int64_t d_stride = 0;
  double alpha = 1.0, beta = 0.0;
  // Where the host does not know alpha: both in device memory, and beta here as well.
  const float* factors = nullptr;
  Epilogue epilogue = Epilogue::None;
  const void* bias = nullptr;     // of result_dtype
  void* bias_gradient = nullptr;  // of result_dtype
  void* aux = nullptr;            // m rows, of result_dtype; read by DGelu and DRelu
  int64_t aux_stride = 0;         // elements from row to row; bits for ReLU
  bool tf32 = false;              // torch's setting for float32
  PartialSums partial_sums = PartialSums::AnyPrecision;
  // Gives memory that stays valid on the stream while the product runs. Called once or not at all.
  void* (*allocate)(void* owner, uint64_t bytes) = nullptr;
  void* owner = nullptr;
};

// False where cuBLASLt has no algorithm for it, and then nothing was queued.
inline const Kernel<bool(Stream, const Gemm&)> gemm{"gemm"};

}  // namespace transformer_ops::cuda
