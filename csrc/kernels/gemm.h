// Products with cuBLASLt, row-major: D[m, n] = epilogue(alpha A[m, k] B[k, n] + beta C[m, n]).
#pragma once

#include "kernels/cuda.h"

namespace transformer_ops::cuda {

enum class Epilogue : uint8_t {
  None,
  Bias,      // . + bias[n]
  GeluBias,  // gelu_tanh(. + bias[n]); aux, if wanted, receives its argument
  SumA,      // bias_gradient receives the sums over k of A: m numbers
};

// How sums over parts of k may be added: torch's settings for float16 and bfloat16.
enum class PartialSums : uint8_t { AnyPrecision, FullPrecision, None };

// The type of a matrix's codes, or None for numbers of the product's dtype. Two E2M1 codes are in a
// byte, the first one in the low bits.
enum class Codes : uint8_t { None, E4M3, E5M2, E2M1 };

// The codes that share a scale, in A (m x k) and in B's transpose (n x k). The comments give the
// index of the scale for row i and for block b of the columns.
enum class Scaling : uint8_t {
  Matrix,      // 0: all codes
  Vectors128,  // b * rows + i: 128 of a row
  Blocks128,   // i / 128 * stride + b: 128 x 128; stride is the number of b, rounded up to a
               // multiple of 4
  // 32 of a row. A scale is a byte, the exponent of a power of two (E8M0). Scales are in tiles of
  // 128 rows and 4 blocks, stored row by row, at i % 32 * 16 + i % 128 / 32 * 4 + b % 4 within a
  // tile. Tiles at the end are padded with zeros.
  Vectors32,
  Vectors16,  // the same for 16 of a row; the byte is an E4M3 number
};

struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;       // elements from row to row as stored
  bool transposed = false;  // stored as its transpose
  Codes codes = Codes::None;
  // The factor of codes, in device memory: one float32, unless `scaling` says otherwise.
  const void* scale = nullptr;
  Scaling scaling = Scaling::Matrix;
};

struct Gemm {
  int64_t m, n, k;     // none is 0
  DType dtype;         // of A and B, or BFloat16 if they are codes
  DType result_dtype;  // of C and D: dtype, or Float32
  Matrix a, b;
  const void* c = nullptr;  // may be d; read if beta is not 0
  int64_t c_stride = 0;
  void* d = nullptr;
  int64_t d_stride = 0;
  double alpha = 1.0, beta = 0.0;
  // If the host does not know alpha: alpha and beta in device memory; beta must be set here, too.
  const float* factors = nullptr;
  Epilogue epilogue = Epilogue::None;
  const void* bias = nullptr;     // of result_dtype
  void* bias_gradient = nullptr;  // of result_dtype
  void* aux = nullptr;            // m rows, of result_dtype
  int64_t aux_stride = 0;         // elements from row to row
  bool tf32 = false;              // torch's setting for float32
  bool fast_sums = false;         // for codes: sums with fewer bits than float32
  PartialSums partial_sums = PartialSums::AnyPrecision;
  // Returns memory that stays valid on the stream while the product runs. It is called at most
  // once.
  void* (*allocate)(void* owner, uint64_t bytes) = nullptr;
  void* owner = nullptr;
};

// Does the current device multiply codes at all?
inline const Kernel<bool()> multiplies_codes{"multiplies_codes"};

// Codes are multiplied if both matrices have them, and not both E5M2. A is stored as it is, B as
// its transpose: all GPUs that multiply codes have this combination (cuBLAS documentation,
// "cublasLtMatmul"). k, n, the stored rows and all addresses must be multiples of 16 bytes.
constexpr bool has_size_of_codes(int64_t n, int64_t k) { return n % 16 == 0 && k % 16 == 0; }

// Codes with block scales, for both matrices but not both Blocks128: only on compute capability 9.0
// (same documentation, "128-element 1D and 128x128 2D Block Scaling"), with full precision sums.
// cuBLASLt does not require that k is a multiple of a block; we do.
inline const Kernel<bool()> multiplies_blocks{"multiplies_blocks"};
constexpr bool has_size_of_blocks(int64_t m, int64_t n, int64_t k) {
  return m % 4 == 0 && n % 16 == 0 && k % 128 == 0;
}

// Both matrices Vectors32: from compute capability 10.0 on (same documentation, "16/32-Element 1D
// Block Scaling"). We require multiples of a block, as TransformerEngine does.
inline const Kernel<bool()> multiplies_mx{"multiplies_mx"};
constexpr bool has_size_of_mx(int64_t m, int64_t n, int64_t k) {
  return m % 32 == 0 && n % 32 == 0 && k % 32 == 0;
}

// Both matrices E2M1 with Vectors16, which require each other: also from compute capability 10.0
// on. k and the stored rows must be multiples of 16 bytes; n must be a multiple of 16, as torch
// requires (`_scaled_mm`). The factors may be in device memory.
inline const Kernel<bool()> multiplies_nvfp4{"multiplies_nvfp4"};
constexpr bool has_size_of_nvfp4(int64_t n, int64_t k) { return n % 16 == 0 && k % 32 == 0; }

// Does torch multiply groups of rows, `_grouped_mm`, without waiting for their sizes?
inline const Kernel<bool()> multiplies_groups{"multiplies_groups"};

// Sets the rows from *first on to zero; `first` is in device memory. Rows are multiples of 16
// bytes, and start at one.
inline const Kernel<void(Stream, void* rows, const int64_t* first, int64_t count,
                         int64_t row_bytes)>
    zero_rows_from{"zero_rows_from"};

// Returns false, with nothing queued, if cuBLASLt has no algorithm.
inline const Kernel<bool(Stream, const Gemm&)> gemm{"gemm"};

}  // namespace transformer_ops::cuda
