#include "interpret.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels/encoding.h"
#include "kernels/math.h"
#include "numbers.h"

namespace transformer_ops::cuda {
namespace {

// op(X), row by row or column by column.
struct Operand {
  std::vector<double> values;
  int64_t rows, cols;
};

double get(DType dtype, Codes codes, const void* data, int64_t i) {
  if (codes == Codes::None) return get_number(dtype, data, i);
  if (codes == Codes::E2M1) {
    const uint32_t both = static_cast<const uint8_t*>(data)[i / 2];
    return encoding::decode<encoding::E2M1>(i % 2 == 0 ? both & 0xf : both >> 4);
  }
  const uint32_t code = static_cast<const uint8_t*>(data)[i];
  return codes == Codes::E4M3 ? encoding::decode<encoding::E4M3>(code)
                              : encoding::decode<encoding::E5M2>(code);
}

// What element (outer, inner) of A, or of B's transpose, is multiplied by: as the cuBLAS
// documentation lays out scales ("Scaling factors layouts" of "128-element 1D and 128x128 2D Block
// Scaling For FP8 Data Types", "1D Block Scaling Factors Layout").
double scale_at(const void* scale, Scaling scaling, int64_t outer, int64_t inner, int64_t outers,
                int64_t inners) {
  if (scale == nullptr) return 1.0;
  const auto* const numbers = static_cast<const float*>(scale);
  const int64_t blocks = (inners + 127) / 128, block = inner / 128;
  switch (scaling) {
    case Scaling::Vectors128:
      return numbers[outer + block * outers];
    case Scaling::Blocks128:
      return numbers[outer / 128 * ((blocks + 3) / 4 * 4) + block];
    case Scaling::Vectors32: {
      // A tile of scales is that of 128 x 128 elements.
      const int64_t tile = outer / 128 * blocks + block, row = outer % 128;
      const int64_t at = tile * 512 + row % 32 * 16 + row / 32 * 4 + inner / 32 % 4;
      const uint8_t byte = static_cast<const uint8_t*>(scale)[at];
      return byte == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, byte - 127);
    }
    case Scaling::Vectors16: {
      // A tile of scales is that of 128 x 64 elements.
      const int64_t tile = outer / 128 * ((inners + 63) / 64) + inner / 64, row = outer % 128;
      const int64_t at = tile * 512 + row % 32 * 16 + row / 32 * 4 + inner / 16 % 4;
      return encoding::decode<encoding::E4M3>(static_cast<const uint8_t*>(scale)[at]);
    }
    case Scaling::Matrix:
      break;
  }
  return *numbers;
}

Operand read(DType dtype, Codes codes, const void* scale, Scaling scaling, const void* data,
             const Layout& layout, bool transpose, bool by_rows) {
  Operand operand = {
      {}, transpose ? layout.cols : layout.rows, transpose ? layout.rows : layout.cols};
  operand.values.resize(static_cast<size_t>(layout.rows * layout.cols));
  for (int64_t j = 0; j < layout.cols; ++j) {
    for (int64_t i = 0; i < layout.rows; ++i) {
      const int64_t row = transpose ? j : i, col = transpose ? i : j;
      const int64_t at = by_rows ? row * operand.cols + col : col * operand.rows + row;
      // A is read by rows and B by columns, and the sum runs along those.
      const double factor = by_rows
                                ? scale_at(scale, scaling, row, col, operand.rows, operand.cols)
                                : scale_at(scale, scaling, col, row, operand.cols, operand.rows);
      operand.values[static_cast<size_t>(at)] = get(dtype, codes, data, i + j * layout.ld) * factor;
    }
  }
  return operand;
}

double after_bias(LtEpilogue epilogue, double x, const void* aux, int64_t at, DType dtype) {
  if (epilogue == LtEpilogue::GeluAuxBias) set_number(dtype, const_cast<void*>(aux), at, x);
  const bool is_gelu = epilogue == LtEpilogue::GeluAuxBias || epilogue == LtEpilogue::GeluBias;
  return is_gelu ? math::GELU().forward(x) : x;
}

bool adds_bias(LtEpilogue epilogue) {
  return epilogue == LtEpilogue::Bias || epilogue == LtEpilogue::GeluBias ||
         epilogue == LtEpilogue::GeluAuxBias;
}

}  // namespace

void interpret(const GemmPlan& plan) {
  const LtProblem& problem = plan.problem;
  // Only C may be D: cuBLASLt does not say when a tile of D is written.
  for (const void* read : {plan.a, plan.b, plan.aux}) {
    if (read == plan.d) throw std::runtime_error("[gemm] D must not be what the product reads");
  }
  const Operand a = read(problem.dtype, problem.a_codes, plan.a_scale, problem.a_scaling, plan.a,
                         problem.a, problem.transpose_a, /*by_rows=*/true);
  const Operand b = read(problem.dtype, problem.b_codes, plan.b_scale, problem.b_scaling, plan.b,
                         problem.b, problem.transpose_b, /*by_rows=*/false);
  const LtEpilogue epilogue = problem.epilogue;
  const DType dtype = problem.result_dtype;
  const int64_t inner = a.cols;
  const double alpha = plan.factors != nullptr ? plan.factors[0] : plan.alpha;
  const double beta = plan.factors != nullptr ? plan.factors[1] : plan.beta;
  for (int64_t j = 0; j < b.cols; ++j) {
    for (int64_t i = 0; i < a.rows; ++i) {
      const double* const left = a.values.data() + i * inner;
      const double* const right = b.values.data() + j * inner;
      double sum = 0;
      for (int64_t l = 0; l < inner; ++l) sum += left[l] * right[l];
      double x = alpha * sum;
      if (beta != 0) x += beta * get_number(dtype, plan.c, i + j * problem.c.ld);
      if (adds_bias(epilogue)) x += get_number(dtype, plan.bias, i);
      x = after_bias(epilogue, x, plan.aux, i + j * problem.aux_ld, dtype);
      set_number(dtype, plan.d, i + j * problem.d.ld, x);
    }
  }
  if (epilogue != LtEpilogue::BgradB) return;
  for (int64_t i = 0; i < b.cols; ++i) {
    double sum = 0;
    for (int64_t l = 0; l < inner; ++l) sum += b.values[static_cast<size_t>(i * inner + l)];
    set_number(dtype, const_cast<void*>(plan.bias), i, sum);
  }
}

}  // namespace transformer_ops::cuda
