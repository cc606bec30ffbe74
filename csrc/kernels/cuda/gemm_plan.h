// What cuBLASLt is asked for a row-major product: its matrices are column-major, and a row-major
// matrix is the column-major one of its transpose, so the product becomes D^T = B^T A^T. Free of
// CUDA's headers: tests interpret a plan on the CPU.
#pragma once

#include <array>
#include <optional>

#include "kernels/gemm.h"

namespace transformer_ops::cuda {

// The numbers of cublasLtEpilogue_t.
enum class LtEpilogue : uint32_t {
  Default = 1,
  Bias = 4,
  ReluBias = 6,
  GeluBias = 36,
  ReluAuxBias = 134,
  DRelu = 136,
  DReluBgrad = 152,
  GeluAuxBias = 164,
  DGelu = 192,
  DGeluBgrad = 208,
  BgradA = 256,
  BgradB = 512,
};

// Element (i, j) lies at data[i + j * ld].
struct Layout {
  int64_t rows, cols, ld;

  bool operator==(const Layout&) const = default;
};

// All that an algorithm is chosen by.
struct LtProblem {
  DType dtype;
  DType result_dtype;
  Codes a_codes, b_codes;  // instead of numbers of dtype
  Scaling a_scaling, b_scaling;
  bool tf32;
  bool fast_sums;  // of codes
  PartialSums partial_sums;
  LtEpilogue epilogue;
  bool transpose_a, transpose_b;
  Layout a, b, c, d;  // as stored
  int64_t aux_ld;     // 0: no aux
  bool factors_on_device;
  // Of a, b, c, d, bias and aux: the largest power of two up to 256 that divides the address.
  std::array<uint16_t, 6> alignment;

  bool operator==(const LtProblem&) const = default;
};

struct LtProblemHash {
  size_t operator()(const LtProblem& problem) const;
};

// D = epilogue(alpha op(A) op(B) + beta C), all column-major.
struct GemmPlan {
  LtProblem problem;
  const void* a;
  const void* b;
  const void* c;  // d where beta is 0
  void* d;
  const void* bias;  // or where a bias gradient goes
  const void* aux;
  const void* a_scale;  // of codes, in device memory; null: 1
  const void* b_scale;
  double alpha, beta;
  const float* factors;  // null, or both in device memory
};

inline bool has_blocks(const LtProblem& problem) { return problem.a_scaling != Scaling::Matrix; }

// None where cuBLASLt's rules exclude it; where they do not, it may still have no algorithm.
std::optional<GemmPlan> plan_gemm(const Gemm& gemm);

// What fills the slot: of gemm.cpp, or of tests.
namespace entry {
bool multiplies_codes();
bool multiplies_blocks();
bool multiplies_mx();
bool multiplies_nvfp4();
bool gemm(Stream stream, const Gemm& gemm);
}  // namespace entry

}  // namespace transformer_ops::cuda
