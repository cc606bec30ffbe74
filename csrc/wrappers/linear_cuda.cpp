#include "wrappers/linear_cuda.h"

#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/util/FunctionRef.h>

#include <utility>

#include "kernels/gemm.h"
#include "kernels/quantize.h"
#include "kernels/transpose.h"
#include "op/codes.h"
#include "wrappers/bias.h"
#include "wrappers/cuda.h"
#include "wrappers/matrix_operand.h"
#include "wrappers/quantized.h"

namespace transformer_ops {
namespace {

using cuda::Epilogue;
using cuda::Gemm;
using cuda::Matrix;
using cuda::Scaling;

// The operands of a product. Their scales are in device memory.
struct Operands {
  MatrixOperand left, right;
  OperandScales scales = {};
  bool fast_sums = false;  // for codes

  int64_t rows() const { return left.rows(); }
  int64_t cols() const { return right.cols(); }
};

// The operands of x W^T. Gradients do not use fast sums, as in TransformerEngine.
Operands of_forward(const Tensor& input, const Tensor& weight, const OperandScales& scales) {
  return {MatrixOperand(input), MatrixOperand(weight).t(), scales, /*fast_sums=*/true};
}

Tensor empty_rows(const Tensor& like, int64_t width, at::ScalarType dtype) {
  c10::DimVector sizes(like.sizes());
  sizes.back() = width;
  return empty(sizes, dtype, like.device());
}

cuda::PartialSums partial_sums(at::ScalarType dtype) {
  const auto& context = at::globalContext();
  switch (dtype == at::kHalf ? context.allowFP16ReductionCuBLAS()
                             : context.allowBF16ReductionCuBLAS()) {
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return cuda::PartialSums::FullPrecision;
    case at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK:
      return cuda::PartialSums::None;
    case at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK:
      break;
  }
  return cuda::PartialSums::AnyPrecision;
}

// Torch's float32 setting for matrix products. `allowTF32CuBLAS` raises if a program has used both
// torch's older and its newer way to set it.
bool tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32 &&
         !at::NoTF32Guard::should_disable_tf32();
}

// Describes result = left right; callers add the rest.
Gemm describe(const MatrixOperand& left, const MatrixOperand& right, const Tensor& result) {
  const auto dtype = left.product_dtype();
  TORCH_CHECK(left.cols() == right.rows() && dtype == right.product_dtype(),
              "[linear] factors must fit in shape and dtype, got [", left.rows(), ", ", left.cols(),
              "] ", left.dtype(), " and [", right.rows(), ", ", right.cols(), "] ", right.dtype());
  Gemm gemm = {.m = left.rows(),
               .n = right.cols(),
               .k = left.cols(),
               .dtype = kernel_dtype(dtype),
               .result_dtype = kernel_dtype(result),
               .a = left.matrix(),
               .b = right.matrix(),
               .d = cuda::write(result),
               .d_stride = right.cols()};
  if (dtype == at::kFloat) {
    gemm.tf32 = tf32();
  } else if (dtype != at::kDouble) {
    gemm.partial_sums = partial_sums(dtype);
  }
  return gemm;
}

void set_bias(Gemm& gemm, Epilogue epilogue, const Tensor& bias) {
  gemm.epilogue = epilogue;
  gemm.bias = cuda::read(bias);
}

// aux: the argument of gelu.
void set_aux(Gemm& gemm, void* aux) {
  gemm.aux = aux;
  gemm.aux_stride = gemm.n;
}

bool has_gelu_epilogue(at::ScalarType dtype, int64_t width) {
  // cuBLASLt does not say how exact its tanh is. If it is the hardware's (PTX ISA, tanh.approx.f32:
  // relative error 2^-11), it is exact enough only for 16 bits. Rows of aux are multiples of 8, and
  // the numbers should be the same without aux.
  return (dtype == at::kHalf || dtype == at::kBFloat16) && width % 8 == 0;
}

void set_start(Gemm& gemm, const Tensor& start) {
  gemm.c = cuda::read(start);
  gemm.c_stride = gemm.n;
  gemm.beta = 1.0;
}

struct Workspace {
  c10::Device device;
  Tensor memory = {};  // may be reused by later work on the stream as soon as it is released
};

void* allocate(void* owner, uint64_t bytes) {
  auto& workspace = *static_cast<Workspace*>(owner);
  workspace.memory = empty({static_cast<int64_t>(bytes)}, at::kByte, workspace.device);
  return cuda::write(workspace.memory);
}

bool queue(Gemm& gemm, const Tensor& result) {
  Workspace workspace{result.device()};
  gemm.allocate = allocate;
  gemm.owner = &workspace;
  return cuda::gemm(cuda::stream_of(result), gemm);
}

// Both scales and `scale` as one float32.
Tensor one_factor(const OperandScales& scales, double scale) {
  const Tensor both = !scales.right.defined()  ? scales.left
                      : !scales.left.defined() ? scales.right
                                               : at::mul(scales.left, scales.right);
  return scale == 1.0 ? both : both * scale;
}

// The float32 scale of the tensor within an operand's contiguous scale; null if there is none.
const void* tensor_scale_at(const Tensor& scale) {
  if (!scale.defined()) return nullptr;
  const auto* const bytes = static_cast<const char*>(cuda::read(scale));
  return bytes + scale.nbytes() - sizeof(float);
}

// The factors that cuBLASLt reads from the device if the host does not know alpha.
Tensor factors_on_device(const OperandScales& scales, double alpha, double beta) {
  const auto in_a_row = [](const Tensor& scale) {
    return scale.defined() ? contiguous(scale) : scale;
  };
  const Tensor left = in_a_row(scales.left), right = in_a_row(scales.right);
  const Tensor factors = empty({2}, at::kFloat, (left.defined() ? left : right).device());
  cuda::join_factors(cuda::stream_of(factors), tensor_scale_at(left), tensor_scale_at(right),
                     static_cast<float>(alpha), static_cast<float>(beta),
                     factors.mutable_data_ptr<float>());
  return factors;
}

using Fill = c10::function_ref<void(Gemm&)>;

Matrix matrix_of_codes(const MatrixOperand& factor, const Tensor& scale, Scaling scaling) {
  Matrix matrix = factor.matrix();
  matrix.codes = factor.is_paired()                     ? cuda::Codes::E2M1
                 : factor.dtype() == at::kFloat8_e4m3fn ? cuda::Codes::E4M3
                                                        : cuda::Codes::E5M2;
  if (scale.defined()) matrix.scale = cuda::read(scale);
  matrix.scaling = scaling;
  return matrix;
}

// The scalings of both operands.
struct Scalings {
  Scaling left = Scaling::Matrix, right = Scaling::Matrix;
};

// The scalings with which cuBLASLt may multiply the codes; none if it cannot.
std::optional<Scalings> scalings_of_codes(const Operands& operands) {
  const MatrixOperand &left = operands.left, &right = operands.right;
  const auto& [left_scale, right_scale] = operands.scales;
  if (!left.has_codes() || !right.has_codes()) return std::nullopt;
  if (left.is_paired()) {
    const bool may_multiply =
        cuda::has_size_of_nvfp4(right.cols(), left.cols()) && cuda::multiplies_nvfp4();
    return may_multiply ? std::optional(Scalings{Scaling::Vectors16, Scaling::Vectors16})
                        : std::nullopt;
  }
  if (left.dtype() != at::kFloat8_e4m3fn && right.dtype() != at::kFloat8_e4m3fn) {
    return std::nullopt;
  }
  const int64_t m = left.rows(), n = right.cols(), k = left.cols();
  if (!is_of_blocks(left_scale) && !is_of_blocks(right_scale)) {
    const bool is_one = cuda::has_size_of_codes(n, k) && cuda::multiplies_codes();
    return is_one ? std::optional<Scalings>(std::in_place) : std::nullopt;
  }
  if (!is_of_blocks(left_scale) || !is_of_blocks(right_scale)) return std::nullopt;
  const bool is_mx = has_mx(left_scale);
  if (is_mx != has_mx(right_scale)) return std::nullopt;
  const bool may_multiply = is_mx ? cuda::has_size_of_mx(m, n, k) && cuda::multiplies_mx()
                                  : cuda::has_size_of_blocks(m, n, k) && cuda::multiplies_blocks();
  if (!may_multiply) return std::nullopt;
  const auto of_left = left.scaling(left_scale), of_right = right.t().scaling(right_scale);
  if (!of_left || !of_right) return std::nullopt;
  if (*of_left == Scaling::Blocks128 && *of_right == Scaling::Blocks128) return std::nullopt;
  return Scalings{*of_left, *of_right};
}

// The block scales in the layout of the product.
OperandScales stored_scales(const Operands& operands, const Scalings& scalings) {
  if (scalings.left == Scaling::Matrix) return operands.scales;
  return {operands.left.stored_scales(operands.scales.left, scalings.left),
          operands.right.t().stored_scales(operands.scales.right, scalings.right)};
}

bool run_codes(const Operands& operands, double scale, const Tensor& result, Fill fill) {
  const auto scalings = scalings_of_codes(operands);
  if (!scalings) return false;
  const MatrixOperand left = operands.left.stored(/*as_transpose=*/false),
                      right = operands.right.stored(/*as_transpose=*/true);
  const OperandScales scales = stored_scales(operands, *scalings);
  Gemm gemm = describe(left, right, result);
  gemm.a = matrix_of_codes(left, scales.left, scalings->left);
  gemm.b = matrix_of_codes(right, scales.right, scalings->right);
  gemm.fast_sums = operands.fast_sums;
  gemm.alpha = scale;
  fill(gemm);
  Tensor factors;
  if (scalings->left == Scaling::Vectors16) {
    factors = factors_on_device(operands.scales, gemm.alpha, gemm.beta);
    gemm.factors = factors.const_data_ptr<float>();
  }
  return queue(gemm, result);
}

// Replaces codes by numbers multiplied by block scales; scales of the tensor are still applied
// later.
void decode(Operands& operands) {
  const auto decode = [](MatrixOperand& factor, Tensor& scale) {
    const bool is_paired = factor.is_paired();
    factor = factor.decoded(scale);
    if (is_paired) {
      scale = scale_of_tensor(scale);
    } else if (is_of_blocks(scale)) {
      scale = Tensor();
    }
  };
  decode(operands.left, operands.scales.left);
  decode(operands.right, operands.scales.right);
}

// Computes result = scale left right with cuBLASLt, and what `fill` adds. Returns false if it has
// no algorithm: nothing was computed then, and ATen can multiply the operands.
bool run(Operands& operands, double scale, const Tensor& result, Fill fill) {
  if (run_codes(operands, scale, result, fill)) return true;
  decode(operands);
  Gemm gemm = describe(operands.left, operands.right, result);
  gemm.alpha = scale;
  fill(gemm);
  Tensor factors;
  if (operands.scales.defined()) {
    factors = factors_on_device(operands.scales, gemm.alpha, gemm.beta);
    gemm.factors = factors.const_data_ptr<float>();
  }
  return queue(gemm, result);
}

// Rounds once, as cuBLASLt does.
void scaled_by_aten(const Operands& operands, double scale, const Tensor& start, Tensor out) {
  Tensor sum = to_accumulate(at::mm(operands.left.tensor(), operands.right.tensor()));
  sum.mul_(one_factor(operands.scales, scale));
  if (start.defined()) sum.add_(start);
  out.copy_(sum);
}

void product_by_aten(const MatrixOperand& left, const MatrixOperand& right, double scale,
                     const Tensor& start, Tensor out) {
  if (out.scalar_type() != left.dtype()) {
    Tensor narrow = empty(out.sizes(), left.dtype(), out.device());
    product_by_aten(left, right, scale, /*start=*/{}, narrow);
    start.defined() ? at::add_out(out, start, narrow) : out.copy_(narrow);
  } else if (start.defined()) {
    at::addmm_out(out, start, left.tensor(), right.tensor(), /*beta=*/1, scale);
  } else if (scale == 1.0) {
    at::mm_out(out, left.tensor(), right.tensor());
  } else {
    at::addmm_out(out, out, left.tensor(), right.tensor(), /*beta=*/0, scale);
  }
}

// result = scale left right + start; an undefined start is zero.
void product(Operands operands, const Tensor& result, double scale = 1.0,
             const Tensor& start = {}) {
  const bool done = run(operands, scale, result, [&](Gemm& gemm) {
    if (start.defined()) set_start(gemm, start);
  });
  if (done) return;
  const Tensor out = result.view({operands.rows(), operands.cols()});
  const Tensor from = start.defined() ? start.view(out.sizes()) : start;
  if (operands.scales.defined()) return scaled_by_aten(operands, scale, from, out);
  product_by_aten(operands.left, operands.right, scale, from, out);
}

}  // namespace

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias, double scale,
                   const OperandScales& scales) {
  Operands operands = of_forward(input, weight, scales);
  Tensor result = empty_rows(input, operands.cols(), product_dtype(input));
  if (!bias.defined()) {
    product(operands, result, scale);
    return result;
  }
  const bool done =
      run(operands, scale, result, [&](Gemm& gemm) { set_bias(gemm, Epilogue::Bias, bias); });
  if (done) return result;
  Tensor out = result.view({operands.rows(), operands.cols()});
  if (operands.scales.defined()) {
    scaled_by_aten(operands, scale, bias, out);
  } else {
    at::addmm_out(out, bias, operands.left.tensor(), operands.right.tensor(), /*beta=*/1, scale);
  }
  return result;
}

void linear_into_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias, Tensor out) {
  Operands operands = of_forward(input, weight, {});
  const bool done = run(operands, /*scale=*/1.0, out, [&](Gemm& gemm) {
    gemm.d_stride = out.stride(0);
    if (bias.defined()) set_bias(gemm, Epilogue::Bias, bias);
  });
  if (done) return;
  const Tensor left = operands.left.tensor(), right = operands.right.tensor();
  bias.defined() ? at::addmm_out(out, bias, left, right) : at::mm_out(out, left, right);
}

std::optional<Tensor> linear_gelu_cuda(const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, Tensor* kept,
                                       const OperandScales& scales) {
  if (!has_gelu_epilogue(product_dtype(input), weight.size(0))) return std::nullopt;
  Operands operands = of_forward(input, weight, scales);
  Tensor result = empty_rows(input, operands.cols(), product_dtype(input));
  if (kept != nullptr) *kept = empty(result.sizes(), result.scalar_type(), result.device());
  const auto fill = [&](Gemm& gemm) {
    set_bias(gemm, Epilogue::GeluBias, bias);
    if (kept != nullptr) set_aux(gemm, cuda::write(*kept));
  };
  // If cuBLASLt can multiply the codes, but not with GELU, separate GELU is faster than a product
  // of values.
  const bool done = scalings_of_codes(operands) ? run_codes(operands, /*scale=*/1.0, result, fill)
                                                : run(operands, /*scale=*/1.0, result, fill);
  if (!done) return std::nullopt;
  return result;
}

Tensor linear_add_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias,
                       const Tensor& extra, double scale, const OperandScales& scales) {
  Operands operands = of_forward(input, weight, scales);
  const Tensor start = contiguous(extra);
  Tensor result = empty_rows(input, operands.cols(), product_dtype(input));
  if (!bias.defined()) {
    product(operands, result, scale, start);
    return result;
  }
  const bool done = run(operands, scale, result, [&](Gemm& gemm) {
    set_start(gemm, start);
    set_bias(gemm, Epilogue::Bias, bias);
  });
  if (!done) {
    product(operands, result, scale, start);
    result.add_(bias);
  }
  return result;
}

LinearBackward linear_backward_cuda(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                    const LinearGradients& fused) {
  const auto dtype = product_dtype(grad_output);
  Tensor grad_input, grad_weight;
  if (input.defined()) {
    const MainGrad& main_grad = fused.main_grad;
    grad_weight = main_grad.buffer.defined()
                      ? main_grad.buffer
                      : empty({grad_output.size(-1), input.size(-1)}, dtype, grad_output.device());
    linear_weight_gradient_cuda(
        grad_output, input, grad_weight,
        {.adds = main_grad.adds, .scale = fused.scale, .scales = fused.scales});
    input.reset();
  }
  if (weight.defined()) {
    const MatrixOperand w = MatrixOperand::of_rows(weight);
    const Tensor& start = fused.residual;
    grad_input = empty_rows(grad_output, w.cols(), start.defined() ? start.scalar_type() : dtype);
    product({MatrixOperand(grad_output), w, fused.scales}, grad_input, fused.scale, start);
  }
  for (Tensor* const result : {&grad_input, &grad_weight}) {
    if (!result->defined()) *result = empty({0}, dtype, grad_output.device());
  }
  return {std::move(grad_input), std::move(grad_weight)};
}

Tensor linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight) {
  return std::get<0>(linear_backward_cuda(grad_output, {}, weight));
}

void linear_input_gradient_cuda(const Tensor& grad_output, const Tensor& weight,
                                const Tensor& grad_input) {
  product({MatrixOperand(grad_output), MatrixOperand(weight)}, grad_input);
}

void linear_weight_gradient_cuda(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& grad_weight, const WeightGradient& how) {
  Operands operands{MatrixOperand::of_rows(grad_output).t(), MatrixOperand::of_rows(input),
                    how.scales};
  const auto dtype = product_dtype(grad_output), wanted = grad_weight.scalar_type();
  const bool takes_sums = wanted == dtype || (wanted == at::kFloat && dtype != at::kDouble);
  if (!takes_sums || !grad_weight.is_contiguous()) {
    const Tensor found = empty(grad_weight.sizes(), dtype, grad_weight.device());
    linear_weight_gradient_cuda(
        grad_output, input, found,
        {.scale = how.scale, .grad_bias = how.grad_bias, .scales = how.scales});
    how.adds ? grad_weight.add_(found) : grad_weight.copy_(found);
    return;
  }
  const Tensor start = how.adds ? grad_weight : Tensor();
  if (how.grad_bias.defined()) {
    // These sums have the dtype of grad_weight.
    const Tensor sums =
        wanted == dtype ? how.grad_bias : empty(how.grad_bias.sizes(), wanted, input.device());
    // With TF32, cuBLASLt may add up the rounded operands of the product.
    const bool rounds = dtype == at::kFloat && tf32();
    const bool done = !rounds && run(operands, /*scale=*/1.0, grad_weight, [&](Gemm& gemm) {
      if (start.defined()) set_start(gemm, start);
      gemm.epilogue = Epilogue::SumA;
      gemm.bias_gradient = cuda::write(sums);
    });
    if (done) {
      if (wanted != dtype) how.grad_bias.copy_(sums);
      return;
    }
    sum_columns_cuda(grad_output, how.grad_bias);
  }
  product(operands, grad_weight, how.scale, start);
}

}  // namespace transformer_ops
