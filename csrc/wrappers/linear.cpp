#include "wrappers/linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "op/codes.h"
#include "wrappers/cpu.h"
#include "wrappers/product.h"
#include "wrappers/quantized.h"

namespace transformer_ops {
namespace {

// scale left right + start, in recycled memory: mm would allocate each time. An undefined start is
// zero.
Tensor product(const Tensor& left, const Tensor& right, double scale = 1.0,
               const Tensor& start = {}) {
  Tensor result = empty_cpu({left.size(0), right.size(1)}, left.scalar_type());
  if (start.defined()) result.view(start.sizes()).copy_(start);
  multiply_cpu(result, left, right, /*beta=*/start.defined() ? 1 : 0, scale);
  return result;
}

// The spec of a product of that operand.
TensorSpec last_size(const Tensor& tensor, const c10::SymInt& size) {
  TensorSpec spec = like(tensor);
  spec.sizes.back() = size;
  spec.dtype = product_dtype(tensor);
  return spec;
}

// Checks the weight of a product whose output has the gradient `grad`.
void check_backward_weight(const Checks& check, const Tensor& weight, const Tensor& grad) {
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == grad.sym_size(-1), "[", check.op(),
              "] weight must have shape [", grad.sym_size(-1), ", *], got ", weight.sym_sizes());
  TORCH_CHECK(product_dtype(weight) == product_dtype(grad), "[", check.op(),
              "] weight must have dtype ", product_dtype(grad), ", got ", weight.scalar_type());
  check.operand_dtype("weight", weight);
}

// Pairs of codes can only be multiplied with pairs, because their sum is half as long.
void check_pairs(const Checks& check, const char* name, const Tensor& operand,
                 const char* other_name, const Tensor& other) {
  TORCH_CHECK(has_pairs(operand) == has_pairs(other), "[", check.op(), "] ", name,
              " must have pairs of codes where ", other_name, " has such, got ",
              operand.scalar_type(), " and ", other.scalar_type());
}

void check_scale_of_pairs(const Checks& check, const char* name, const Tensor& scale,
                          const char* operand_name, const Tensor& pairs, bool of_rows) {
  const std::string rule = std::string(" must have a byte for each block of 16 or 16 x 16 codes ") +
                           "of " + operand_name + ", and 4 more, got ";
  TORCH_CHECK(scale.defined(), "[", check.op(), "] ", name, rule, "none");
  TORCH_CHECK(blocks_of_pairs(pairs, scale, of_rows), "[", check.op(), "] ", name, rule,
              scale.scalar_type(), " of shape ", scale.sym_sizes(), " for pairs of shape ",
              pairs.sym_sizes());
}

// A scale is one number, or one for each block of the operand's codes.
void check_scale(const Checks& check, const char* name, const Tensor& scale,
                 const char* operand_name, const Tensor& operand, bool sums_rows) {
  if (has_pairs(operand)) {
    return check_scale_of_pairs(check, name, scale, operand_name, operand, sums_rows);
  }
  if (!is_of_blocks(scale)) return;
  TORCH_CHECK(operand.dim() > 0 && find_block_format(operand, scale) != nullptr, "[", check.op(),
              "] ", name, " must be one float32 without dimensions, or one for each block of the ",
              "codes of ", operand_name, ", got shape ", scale.sym_sizes(), " for ",
              operand.scalar_type(), " of shape ", operand.sym_sizes());
}

// The product is that of grad_output and the one operand that is given.
void check_backward_scales(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor* weight, LinearMask wanted, const char* input_name) {
  const auto& [left, right] = check.scales();
  const auto [wants_input, wants_weight] = wanted;
  if (wants_input) check_pairs(check, "weight", *weight, "grad_output", grad_output);
  if (wants_weight) check_pairs(check, input_name, *input, "grad_output", grad_output);
  check_scale(check, "left_scale", left, "grad_output", grad_output, /*sums_rows=*/!wants_input);
  if (!is_of_blocks(left) && !is_of_blocks(right)) return;
  TORCH_CHECK(wants_input != wants_weight && (input == nullptr) == wants_input &&
                  (weight == nullptr) == wants_weight,
              "[", check.op(), "] output_mask must name one gradient, and only ", input_name,
              " or weight be given for it, where scales are of blocks");
  const char* const name = wants_input ? "weight" : input_name;
  const Tensor& operand = wants_input ? *weight : *input;
  check_scale(check, "right_scale", right, name, operand, /*sums_rows=*/true);
}

void check_bias(const Checks& check, const Tensor& bias, const TensorSpec& output) {
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == output.sizes.back(), "[", check.op(),
              "] bias must have shape [", output.sizes.back(), "], got ", bias.sym_sizes());
  TORCH_CHECK(bias.scalar_type() == output.dtype, "[", check.op(), "] bias must have dtype ",
              output.dtype, ", got ", bias.scalar_type());
}

}  // namespace

TensorSpec linear_output(const Checks& check, const Tensor& input, const Tensor& weight,
                         const Tensor* bias) {
  check.operand_dtype("input", input);
  TORCH_CHECK(weight.dim() == 2, "[", check.op(), "] weight must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(input.dim() >= 1, "[", check.op(), "] input must have at least 1 dimension, got 0");
  TORCH_CHECK(input.sym_size(-1) == weight.sym_size(1), "[", check.op(),
              "] input must have last dimension ", weight.sym_size(1), ", got shape ",
              input.sym_sizes());
  TORCH_CHECK(product_dtype(input) == product_dtype(weight), "[", check.op(),
              "] input must have the weight's dtype ", weight.scalar_type(), ", got ",
              input.scalar_type());
  check.operand_dtype("weight", weight);
  check_pairs(check, "weight", weight, "input", input);
  check_scale(check, "left_scale", check.scales().left, "input", input, /*sums_rows=*/false);
  check_scale(check, "right_scale", check.scales().right, "weight", weight, /*sums_rows=*/false);
  TensorSpec output = last_size(input, weight.sym_size(0));
  if (bias != nullptr) check_bias(check, *bias, output);
  return output;
}

TensorSpecs linear_bias_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                              const Tensor& bias) {
  return {linear_output(check, input, weight, &bias)};
}

Tensor linear_bias_decomposed(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return at::linear(input, weight, bias);
}

double factor_of(at::ScalarType dtype, double scale) {
  if (dtype == at::kDouble || std::abs(scale) <= std::numeric_limits<float>::max()) return scale;
  return scale * std::numeric_limits<double>::infinity();
}

std::optional<std::string> different_linear_dtypes(const Match& match) {
  // Under autocast both are cast.
  if (match.key().autocast) return std::nullopt;
  const auto& weight = match.parameters(0)[0];
  const auto& bias = match.parameters(1)[0];
  if (weight.dtype == bias.dtype) return std::nullopt;
  return "weight and bias have different dtypes";
}

TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor* input, const Tensor* weight, LinearMask wanted,
                                    const char* input_name) {
  check.operand_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  const auto [wants_input, wants_weight] = wanted;
  const TensorSpec none = absent(product_dtype(grad_output));
  TensorSpecs specs = {none, none};
  if (wants_input) {
    TORCH_CHECK(weight != nullptr, "[", check.op(),
                "] weight must be given for grad_input, got none");
    check_backward_weight(check, *weight, grad_output);
    specs[0] = last_size(grad_output, weight->sym_size(1));
  }
  if (wants_weight) {
    TORCH_CHECK(input != nullptr, "[", check.op(), "] ", input_name,
                " must be given for grad_weight, got none");
    check.has_rows(input_name, *input);
    TensorSpec as_input = wants_input ? specs[0] : last_size(grad_output, input->sym_size(-1));
    if (as_input.dtype == product_dtype(*input)) {
      check.operand_dtype(input_name, *input);
      as_input.dtype = input->scalar_type();
    }
    check.spec(input_name, *input, as_input);
    specs[1] = {{grad_output.sym_size(-1), input->sym_size(-1)}, product_dtype(grad_output)};
  }
  check_backward_scales(check, grad_output, input, weight, wanted, input_name);
  return specs;
}

TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor& input, const Tensor& weight,
                                    const TensorSpec& factor) {
  check.compute_dtype("grad_output", grad_output);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == factor.sizes.back(), "[", check.op(),
              "] weight must have shape [*, ", factor.sizes.back(), "], got ", weight.sym_sizes());
  TensorSpec output = factor;
  output.sizes.back() = weight.sym_size(0);
  check.spec("grad_output", grad_output, output);
  check.spec("weight", weight, {c10::SymDimVector(weight.sym_sizes()), factor.dtype});
  return {like(input), like(weight)};
}

Tensor with_last_size(const Tensor& matrix, const Tensor& like, int64_t size) {
  if (like.dim() == 2) return matrix;
  auto sizes = like.sizes().vec();
  sizes.back() = size;
  return matrix.view(sizes);
}

Tensor as_matrix(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  // This is not -1, because that is ambiguous if the last dimension is empty.
  c10::SymInt rows = 1;
  for (const auto& size : tensor.sym_sizes().slice(0, tensor.dim() - 1)) rows *= size;
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

ScaledOperand scaled_operand(const Tensor& left, const OperandScales& scales, double scale) {
  const double factor = scales.factor() * scale;
  using Limits = std::numeric_limits<float>;
  const double size = std::abs(factor);
  if (size >= Limits::min() && size <= Limits::max()) return {left, factor};
  // The left operand, whose dtype has the exponents of float32, takes as little of the factor as
  // possible.
  int moved = std::ilogb(factor);
  moved -= std::clamp(moved, Limits::min_exponent - 1, Limits::max_exponent - 1);
  Tensor multiple = left;
  for (int rest = moved; rest != 0;) {
    const int step = std::clamp(rest, -126, 126);  // a power of two that float32 holds
    multiple = multiple * std::ldexp(1.0, step);
    rest -= step;
  }
  return {multiple, std::ldexp(factor, -moved)};
}

Tensor repeat_rows_cpu(const Tensor& row, int64_t count) {
  Tensor rows = empty_cpu({count, row.size(0)}, row.scalar_type());
  const cpu::Rows out{rows, row.size(0)};
  cpu::parallel(out.count(), out.width, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out.write(i), row.const_data_ptr(), row.nbytes());
    }
  });
  return rows;
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias, double scale) {
  const Tensor matrix = as_matrix(input);
  if (!bias.defined()) {
    return with_last_size(product(matrix, transposed(weight), scale), input, weight.size(0));
  }
  const Tensor output = repeat_rows_cpu(bias, matrix.size(0));
  multiply_cpu(output, matrix, transposed(weight), /*beta=*/1, scale);
  return with_last_size(output, input, weight.size(0));
}

Tensor add_linear_cpu(const Tensor& start, const Tensor& input, const Tensor& weight,
                      double scale) {
  const Tensor matrix = as_matrix(input);
  const Tensor sum = start.view({matrix.size(0), weight.size(0)});
  multiply_cpu(sum, matrix, transposed(weight), /*beta=*/1, scale);
  return start;
}

void product_cpu(const Tensor& out, const Tensor& left, const Tensor& right, bool adds,
                 double scale) {
  // A 16-bit product that starts from other numbers takes longer by more than a separate pass.
  if (out.scalar_type() == left.scalar_type() && (!adds || out.element_size() > 2)) {
    multiply_cpu(out, left, right, /*beta=*/adds ? 1 : 0, scale);
    return;
  }
  const Tensor found = product(left, right, scale);
  adds ? out.add_(found) : out.copy_(found);
}

LinearBackward linear_backward_cpu(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                   const LinearGradients& fused) {
  const Tensor grad = as_matrix(grad_output);
  Tensor grad_input, grad_weight;
  if (input.defined()) {
    input = as_matrix(input);
    if (fused.main_grad.buffer.defined()) {
      grad_weight = fused.main_grad.buffer;
      product_cpu(grad_weight, transposed(grad), input, fused.main_grad.adds, fused.scale);
    } else {
      grad_weight = product(transposed(grad), input, fused.scale);
    }
    input.reset();
  }
  if (weight.defined()) {
    const Tensor sum = product(grad, weight, fused.scale, fused.residual);
    grad_input = with_last_size(sum, grad_output, weight.size(1));
  }
  for (Tensor* const result : {&grad_input, &grad_weight}) {
    if (!result->defined()) *result = empty_cpu({0}, grad_output.scalar_type());
  }
  return {std::move(grad_input), std::move(grad_weight)};
}

LinearBackward linear_backward_decomposed(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& weight) {
  return {weight.defined() ? at::matmul(grad_output, weight) : Tensor(),
          input.defined() ? as_matrix(grad_output).t().mm(as_matrix(input)) : Tensor()};
}

}  // namespace transformer_ops
