// CUDA kernels on raw, contiguous device memory, and products by cuBLASLt. Free of CUDA's headers,
// so that the ops that call them compile in every build.
//
// Each is queued on its stream and never waits for it. "acc" is the compute type: float, or double
// for Float64. Statistics and partial sums are acc arrays. Pointers need no alignment beyond that
// of their elements, 16 bytes are faster. An output may be exactly one of the inputs of the same
// shape; any other overlap is not allowed. Rows, widths and counts may exceed 2^31 elements.
// What goes wrong at a launch is a std::runtime_error.
#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace transformer_ops::cuda {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

using Stream = void*;  // a cudaStream_t of the current device

// A parameter vector in a dtype of its own, each element plus `add`. Null data: absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::Float32;
  double add = 0.0;
};

// The gradient of a parameter vector, in a dtype of its own. Null data: not wanted.
struct Gradient {
  void* data = nullptr;
  DType dtype = DType::Float32;
};

// Random numbers of torch's CUDA generator: seed and offset, or, while a graph is captured, where
// each replay finds them.
struct Philox {
  uint64_t seed = 0;
  uint64_t offset = 0;  // added to *offset_at in a graph
  const int64_t* seed_at = nullptr;
  const int64_t* offset_at = nullptr;
};

// ---- norms over rows of h

enum class Norm : uint8_t { LayerNorm, RMSNorm, L2 };

struct NormForward {
  Norm norm;
  DType dtype;
  const void* x;
  const void* extra = nullptr;  // normalizes x + extra, rounded to dtype
  Vector gamma = {}, beta = {};
  double eps;
  void* sum = nullptr;  // takes x + extra; may be null
  void* y;
  void* mean = nullptr;  // LayerNorm only
  void* rstd;            // L2: 1 / sqrt(sum(x^2) + eps)
  int64_t rows, h;
};

struct NormBackward {
  Norm norm;
  DType dtype;
  const void* grad_y;
  const void* x;
  const void* mean = nullptr;
  const void* rstd;
  Vector gamma = {};
  const void* residual = nullptr;  // is added to grad_x; both are of residual_dtype
  DType residual_dtype;            // dtype or acc; that of grad_x in any case
  void* grad_x;
  Gradient grad_gamma = {}, grad_beta = {};
  void* partials = nullptr;  // acc [parts, wanted gradients, h]; null where none is wanted
  int64_t parts = 0;         // from norm_backward_parts
  int64_t rows, h;
};

// y = (x - mean) rstd gamma + beta from the statistics of a norm; no mean: 0.
struct Normalize {
  DType dtype;
  const void* x;
  const void* mean = nullptr;
  const void* rstd;
  Vector gamma = {}, beta = {};
  void* y;
  int64_t rows, h;
};

// ---- backward of Bias and what precedes it in backward: grad_x, and its column sums

// Sums over rows, in two deterministic stages: by parts of rows, then over the parts.
struct ColumnSum {
  Gradient out;
  void* partials;  // acc [parts, h] with h the width of what is summed
  int64_t parts;   // from column_sum_parts
};

// ---- products, row-major: D[m, n] = epilogue(alpha A[m, k] B[k, n] + beta C[m, n])

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

// The CPU table (../cpu/kernels.h) describes in more detail what each computes.
struct Kernels {
  // ---- elementwise, n elements
  void (*activation_forward)(Stream, Activation, DType, const void* x, void* y, int64_t n);
  void (*activation_backward)(Stream, Activation, DType, const void* grad_y, const void* x,
                              void* grad_x, int64_t n);
  // ReLU and SReLU only.
  void (*activation_backward_from_output)(Stream, Activation, DType, const void* grad_y,
                                          const void* y, void* grad_x, int64_t n);
  // Bit i % 8 of mask[i / 8]: !(x[i] <= 0). A null mask is not written.
  void (*relu_forward)(Stream, DType, const void* x, void* y, uint8_t* mask, int64_t n);
  void (*relu_backward)(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                        int64_t n);

  // ---- gated linear units: x is rows x 2h, y is rows x h; bias has 2h, kept takes x + bias
  void (*glu_forward)(Stream, const Glu&, DType, const void* x, void* y, int64_t rows, int64_t h);
  void (*glu_backward)(Stream, const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                       int64_t rows, int64_t h);
  void (*bias_glu_forward)(Stream, const Glu&, DType, const void* x, const Vector& bias, void* kept,
                           void* y, int64_t rows, int64_t h);

  // ---- norms
  void (*norm_forward)(Stream, const NormForward&);
  void (*norm_backward)(Stream, const NormBackward&);
  void (*normalize)(Stream, const Normalize&);
  int64_t (*norm_backward_parts)(int64_t rows, int64_t h);

  // ---- bias
  void (*bias_add)(Stream, DType, const void* x, const Vector& bias, void* y, int64_t rows,
                   int64_t h);
  void (*column_sum)(Stream, DType, const void* x, const ColumnSum&, int64_t rows, int64_t h);
  void (*activation_bias_backward)(Stream, Activation, DType, const void* grad_y, const void* x,
                                   void* grad_x, const ColumnSum&, int64_t rows, int64_t h);
  void (*relu_bias_backward)(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                             const ColumnSum&, int64_t rows, int64_t h);
  void (*dropout_bias_backward)(Stream, DType, const void* grad_y, const uint8_t* mask, double p,
                                void* grad_x, const ColumnSum&, int64_t rows, int64_t h);
  // grad_y is rows x h; grad_x and the sums are 2h wide.
  void (*glu_bias_backward)(Stream, const Glu&, DType, const void* grad_y, const void* x,
                            void* grad_x, const ColumnSum&, int64_t rows, int64_t h);
  int64_t (*column_sum_parts)(int64_t rows, int64_t h);

  // ---- dropout; a null mask is not written
  // Element i is kept where its random 32-bit integer is at least p * 2^32, whatever the launch:
  // word i % 4 of Philox4x32-7(key = seed, counter = (i / 8, offset / 4 + i % 8 / 4)), where two
  // 64-bit numbers make a counter. 7 rounds and not torch's 10: these numbers are none of its own.
  void (*dropout_forward)(Stream, DType, const void* x, void* y, uint8_t* mask, const Philox&,
                          double p, int64_t n);
  void (*dropout_backward)(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                           double p, int64_t n);
  // y = dropout(x + bias) + extra; extra and y have the dtype `sum`: dtype, or acc.
  void (*bias_dropout_add)(Stream, DType, DType sum, const void* x, const Vector& bias,
                           const void* extra, void* y, uint8_t* mask, const Philox&, double p,
                           int64_t rows, int64_t h);

  // ---- products; false where cuBLASLt has no algorithm for it, and then nothing was queued
  bool (*gemm)(Stream, const Gemm&);
};

// What dropout_forward and bias_dropout_add advance the generator's offset by.
constexpr uint64_t kPhiloxOffsets = 8;

}  // namespace transformer_ops::cuda
