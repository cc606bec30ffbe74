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

// FP8 or FP4 that stands for numbers, or numbers of the product's dtype. Of E2M1 two are a byte,
// the first one lowest.
enum class Codes : uint8_t { None, E4M3, E5M2, E2M1 };

// Which codes have a scale in common, of A, m x k, and of B's transpose, n x k. That of row i and
// of the columns of block b is at the place that the comment says.
enum class Scaling : uint8_t {
  Matrix,      // 0: all codes
  Vectors128,  // b * rows + i: 128 of a row
  Blocks128,   // i / 128 * stride + b: 128 x 128; stride is the number of b, as a multiple of 4
  // 32 of a row, of which the scale is a byte, the exponent of a power of two (E8M0): in tiles of
  // 128 rows and 4 blocks, one after another row by row, at i % 32 * 16 + i % 128 / 32 * 4 + b % 4
  // of a tile. Tiles at the end are filled up with zeros.
  Vectors32,
  Vectors16,  // the same of 16 of a row, of which the byte is a number in E4M3
};

struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;       // elements from row to row as stored
  bool transposed = false;  // stored as its transpose
  Codes codes = Codes::None;
  // Of codes, by which they are multiplied, in device memory: float32, if `scaling` says no other.
  const void* scale = nullptr;
  Scaling scaling = Scaling::Matrix;
};

struct Gemm {
  int64_t m, n, k;     // none is 0
  DType dtype;         // of A and B, unless they are codes: BFloat16 then
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
  bool fast_sums = false;         // of codes: with fewer bits than float32
  PartialSums partial_sums = PartialSums::AnyPrecision;
  // Gives memory that stays valid on the stream while the product runs. Called once or not at all.
  void* (*allocate)(void* owner, uint64_t bytes) = nullptr;
  void* owner = nullptr;
};

// Does the current device multiply codes at all?
inline const Kernel<bool()> multiplies_codes{"multiplies_codes"};

// Codes are multiplied where both matrices are such, and not both E5M2: A as it is, B stored as its
// transpose, which all GPUs have that multiply codes (cuBLAS documentation, "cublasLtMatmul"). k
// and n, the rows of what is stored and all addresses are multiples of 16 bytes.
constexpr bool has_size_of_codes(int64_t n, int64_t k) { return n % 16 == 0 && k % 16 == 0; }

// Codes with scales of blocks, both matrices and not both Blocks128: on compute capability 9.0
// alone (same documentation, "128-element 1D and 128x128 2D Block Scaling"), with sums of full
// precision. It has no rule that k ends with a block; we ask for that.
inline const Kernel<bool()> multiplies_blocks{"multiplies_blocks"};
constexpr bool has_size_of_blocks(int64_t m, int64_t n, int64_t k) {
  return m % 4 == 0 && n % 16 == 0 && k % 128 == 0;
}

// Both matrices Vectors32: from compute capability 10.0 on (same documentation, "16/32-Element 1D
// Block Scaling"). We ask for multiples of a block, as TransformerEngine does.
inline const Kernel<bool()> multiplies_mx{"multiplies_mx"};
constexpr bool has_size_of_mx(int64_t m, int64_t n, int64_t k) {
  return m % 32 == 0 && n % 32 == 0 && k % 32 == 0;
}

// Both matrices E2M1 with Vectors16, which go with nothing else: likewise from compute capability
// 10.0 on. k is a multiple of 16 bytes, and so are the rows of what is stored; n is one of 16, as
// torch asks (`_scaled_mm`). Here the factors may be in device memory.
inline const Kernel<bool()> multiplies_nvfp4{"multiplies_nvfp4"};
constexpr bool has_size_of_nvfp4(int64_t n, int64_t k) { return n % 16 == 0 && k % 32 == 0; }

// False where cuBLASLt has no algorithm for it, and then nothing was queued.
inline const Kernel<bool(Stream, const Gemm&)> gemm{"gemm"};

}  // namespace transformer_ops::cuda
