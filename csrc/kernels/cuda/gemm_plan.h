// Converts a row-major product to a cuBLASLt problem. Its matrices are column-major, and a
// row-major matrix is the column-major form of its transpose, so the product becomes D^T = B^T A^T.
// It does not include CUDA's headers, so that tests can interpret a plan on the CPU.
#pragma once

#include <array>
#include <optional>

#include "kernels/gemm.h"

namespace transformer_ops::cuda {

// The numbers of cublasLtEpilogue_t.
enum class LtEpilogue : uint32_t {
  Default = 1,
  Bias = 4,
  GeluBias = 36,
  GeluAuxBias = 164,
  BgradB = 512,
};

// Element (i, j) is at data[i + j * ld].
struct Layout {
  int64_t rows, cols, ld;

  bool operator==(const Layout&) const = default;
};

// Everything that the choice of an algorithm depends on.
struct LtProblem {
  DType dtype;
  DType result_dtype;
  Codes a_codes, b_codes;  // instead of numbers of dtype
  Scaling a_scaling, b_scaling;
  bool tf32;
  bool fast_sums;  // for codes
  PartialSums partial_sums;
  LtEpilogue epilogue;
  bool transpose_a, transpose_b;
  Layout a, b, c, d;  // as stored
  int64_t aux_ld;     // 0: no aux
  bool factors_on_device;
  // For a, b, c, d, bias and aux: the largest power of two up to 256 that divides the address.
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
  const void* c;  // d if beta is 0
  void* d;
  const void* bias;  // or the destination of a bias gradient
  const void* aux;
  const void* a_scale;  // for codes, in device memory; null: 1
  const void* b_scale;
  double alpha, beta;
  const float* factors;  // null, or both in device memory
};

inline bool has_blocks(const LtProblem& problem) { return problem.a_scaling != Scaling::Matrix; }

// Returns none if cuBLASLt's rules exclude the product; otherwise it may still have no algorithm.
std::optional<GemmPlan> plan_gemm(const Gemm& gemm);

// The functions that fill the slots, in gemm.cpp or in tests.
namespace entry {
bool multiplies_codes();
bool multiplies_blocks();
bool multiplies_mx();
bool multiplies_nvfp4();
bool multiplies_groups();
bool gemm(Stream stream, const Gemm& gemm);
}  // namespace entry

}  // namespace transformer_ops::cuda
