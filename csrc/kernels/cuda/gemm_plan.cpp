#include "kernels/cuda/gemm_plan.h"

#include <bit>
#include <initializer_list>

namespace transformer_ops::cuda {
namespace {

constexpr uintptr_t kMostAlignment = 256;  // cuBLASLt's heuristics distinguish alignments up to
                                           // this one

uint16_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | kMostAlignment;
  return static_cast<uint16_t>(address & (~address + 1));
}

std::optional<LtEpilogue> lt_epilogue(const Gemm& gemm) {
  switch (gemm.epilogue) {
    case Epilogue::None:
      return LtEpilogue::Default;
    case Epilogue::Bias:
      return LtEpilogue::Bias;
    case Epilogue::GeluBias:
      return gemm.aux != nullptr ? LtEpilogue::GeluAuxBias : LtEpilogue::GeluBias;
    case Epilogue::SumA:  // the row-major A is cuBLASLt's B
      return LtEpilogue::BgradB;
  }
  return std::nullopt;
}

// cublasLt.h requires for CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: a multiple of 128 bits or 8
// elements, and at least the number of rows of D.
bool aux_fits(const Gemm& gemm) {
  return gemm.aux_stride % 8 == 0 && gemm.aux_stride >= gemm.n && alignment(gemm.aux) >= 16;
}

bool has_codes(const Gemm& gemm) {
  return gemm.a.codes != Codes::None || gemm.b.codes != Codes::None;
}

bool has_blocks(const Matrix& matrix) { return matrix.scaling != Scaling::Matrix; }

// Checks the rules of kernels/gemm.h.
bool blocks_fit(const Gemm& gemm) {
  if (!has_blocks(gemm.a) && !has_blocks(gemm.b)) return true;
  if (gemm.a.scale == nullptr || gemm.b.scale == nullptr) return false;
  if (alignment(gemm.a.scale) < 16 || alignment(gemm.b.scale) < 16) return false;
  if (gemm.a.scaling == Scaling::Vectors16 || gemm.b.scaling == Scaling::Vectors16) {
    return gemm.a.scaling == gemm.b.scaling && has_size_of_nvfp4(gemm.n, gemm.k);
  }
  if (gemm.a.scaling == Scaling::Vectors32 || gemm.b.scaling == Scaling::Vectors32) {
    return gemm.a.scaling == gemm.b.scaling && has_size_of_mx(gemm.m, gemm.n, gemm.k);
  }
  const bool both_2d = gemm.a.scaling == Scaling::Blocks128 && gemm.b.scaling == Scaling::Blocks128;
  return has_blocks(gemm.a) && has_blocks(gemm.b) && !both_2d &&
         has_size_of_blocks(gemm.m, gemm.n, gemm.k);
}

// E2M1 needs scales for each 16 numbers, and these need E2M1.
bool has_own_scaling(const Matrix& matrix) {
  return (matrix.codes == Codes::E2M1) == (matrix.scaling == Scaling::Vectors16);
}

// Checks the rules of kernels/gemm.h; of the epilogues, only those that ops use.
bool codes_fit(const Gemm& gemm) {
  if (gemm.a.codes == Codes::None || gemm.b.codes == Codes::None) return false;
  if (gemm.a.codes == Codes::E5M2 && gemm.b.codes == Codes::E5M2) return false;
  const bool has_epilogue = gemm.epilogue == Epilogue::None || gemm.epilogue == Epilogue::Bias ||
                            gemm.epilogue == Epilogue::GeluBias;
  // With float32 results it does not add a float32 bias.
  if (!has_epilogue || (gemm.bias != nullptr && gemm.result_dtype != DType::BFloat16)) return false;
  const bool is_fp4 = gemm.a.codes == Codes::E2M1;
  if (!has_own_scaling(gemm.a) || !has_own_scaling(gemm.b)) return false;
  if (gemm.dtype != DType::BFloat16 || (gemm.factors != nullptr && !is_fp4)) return false;
  if (gemm.a.transposed || !gemm.b.transposed || !has_size_of_codes(gemm.n, gemm.k)) return false;
  if (!blocks_fit(gemm)) return false;
  const int64_t word = is_fp4 ? 32 : 16;  // 16 bytes of codes
  if (gemm.a.stride % word != 0 || gemm.b.stride % word != 0) return false;
  const int64_t result_bytes = gemm.result_dtype == DType::Float32 ? 4 : 2;
  if (gemm.d_stride * result_bytes % 16 != 0) return false;
  if (gemm.beta != 0.0 && (gemm.c_stride * result_bytes % 16 != 0 || alignment(gemm.c) < 16)) {
    return false;
  }
  return alignment(gemm.a.data) >= 16 && alignment(gemm.b.data) >= 16 && alignment(gemm.d) >= 16;
}

// The column-major layout of a row-major rows x cols matrix.
Layout layout_of(const Matrix& matrix, int64_t rows, int64_t cols) {
  return matrix.transposed ? Layout{rows, cols, matrix.stride} : Layout{cols, rows, matrix.stride};
}

}  // namespace

std::optional<GemmPlan> plan_gemm(const Gemm& gemm) {
  const auto epilogue = lt_epilogue(gemm);
  if (gemm.m <= 0 || gemm.n <= 0 || gemm.k <= 0 || !epilogue) return std::nullopt;
  // cuBLASLt has float64 products, but without epilogues.
  if (gemm.dtype == DType::Float64) return std::nullopt;
  if (gemm.result_dtype != gemm.dtype && gemm.result_dtype != DType::Float32) return std::nullopt;
  if (gemm.aux != nullptr && !aux_fits(gemm)) return std::nullopt;
  if (has_codes(gemm) && !codes_fit(gemm)) return std::nullopt;

  const bool float32 = gemm.dtype == DType::Float32;
  const bool reads_c = gemm.beta != 0.0;
  const Layout d{gemm.n, gemm.m, gemm.d_stride};
  GemmPlan plan = {
      .problem = {.dtype = gemm.dtype,
                  .result_dtype = gemm.result_dtype,
                  .a_codes = gemm.b.codes,
                  .b_codes = gemm.a.codes,
                  .a_scaling = gemm.b.scaling,
                  .b_scaling = gemm.a.scaling,
                  .tf32 = float32 && gemm.tf32,
                  .fast_sums = has_codes(gemm) && !has_blocks(gemm.a) && gemm.fast_sums,
                  .partial_sums = float32 ? PartialSums::AnyPrecision : gemm.partial_sums,
                  .epilogue = *epilogue,
                  .transpose_a = gemm.b.transposed,
                  .transpose_b = gemm.a.transposed,
                  .a = layout_of(gemm.b, gemm.k, gemm.n),
                  .b = layout_of(gemm.a, gemm.m, gemm.k),
                  .c = reads_c ? Layout{gemm.n, gemm.m, gemm.c_stride} : d,
                  .d = d,
                  .aux_ld = gemm.aux != nullptr ? gemm.aux_stride : 0,
                  .factors_on_device = gemm.factors != nullptr,
                  .alignment = {}},
      .a = gemm.b.data,
      .b = gemm.a.data,
      .c = reads_c ? gemm.c : gemm.d,
      .d = gemm.d,
      .bias = gemm.bias != nullptr ? gemm.bias : gemm.bias_gradient,
      .aux = gemm.aux,
      .a_scale = gemm.b.scale,
      .b_scale = gemm.a.scale,
      .alpha = gemm.alpha,
      .beta = gemm.beta,
      .factors = gemm.factors};
  for (const Layout& layout : {plan.problem.a, plan.problem.b, plan.problem.c, plan.problem.d}) {
    if (layout.ld < layout.rows) return std::nullopt;
  }
  plan.problem.alignment = {alignment(plan.a), alignment(plan.b),    alignment(plan.c),
                            alignment(plan.d), alignment(plan.bias), alignment(plan.aux)};
  return plan;
}

size_t LtProblemHash::operator()(const LtProblem& problem) const {
  uint64_t hash = 0;
  const auto add = [&hash](auto value) {
    // The multiplier is that of Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4).
    hash = std::rotl((hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u, 29);
  };
  add(problem.dtype);
  add(problem.result_dtype);
  add(problem.a_codes);
  add(problem.b_codes);
  add(problem.a_scaling);
  add(problem.b_scaling);
  add(problem.tf32);
  add(problem.fast_sums);
  add(problem.partial_sums);
  add(problem.epilogue);
  add(problem.transpose_a);
  add(problem.transpose_b);
  for (const Layout& layout : {problem.a, problem.b, problem.c, problem.d}) {
    add(layout.rows);
    add(layout.cols);
    add(layout.ld);
  }
  add(problem.aux_ld);
  add(problem.factors_on_device);
  for (const uint16_t alignment : problem.alignment) add(alignment);
  return hash;
}

}  // namespace transformer_ops::cuda
