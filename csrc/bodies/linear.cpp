#include "bodies/linear.h"

#include <ATen/ops/matmul.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "bodies/cpu.h"
#include "bodies/product.h"

namespace transformer_ops {
namespace {

Tensor with_last_size(const Tensor& matrix, const Tensor& like, int64_t size) {
  if (like.dim() == 2) return matrix;
  auto sizes = like.sizes().vec();
  sizes.back() = size;
  return matrix.view(sizes);
}

// scale left right + start, into recycled memory: mm alone would take fresh memory each time. An
// undefined start is zero.
Tensor product(const Tensor& left, const Tensor& right, double scale = 1.0,
               const Tensor& start = {}) {
  Tensor result = empty_cpu({left.size(0), right.size(1)}, left.scalar_type());
  if (start.defined()) result.view(start.sizes()).copy_(start);
  multiply_cpu(result, left, right, /*beta=*/start.defined() ? 1 : 0, scale);
  return result;
}

// Every row is the bias: where the product's sums start.
Tensor repeat_rows(const Tensor& row, int64_t count) {
  Tensor rows = empty_cpu({count, row.size(0)}, row.scalar_type());
  const cpu::Rows out{rows, row.size(0)};
  cpu::parallel(out.count(), out.width, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out.write(i), row.const_data_ptr(), row.nbytes());
    }
  });
  return rows;
}

TensorSpec last_size(const Tensor& tensor, const c10::SymInt& size) {
  TensorSpec spec = like(tensor);
  spec.sizes.back() = size;
  return spec;
}

// Of a product whose output has the gradient `grad`.
void check_backward_weight(const Args& args, const Tensor& weight, const Tensor& grad) {
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == grad.sym_size(-1), "[", args.op(),
              "] weight must have shape [", grad.sym_size(-1), ", *], got ", weight.sym_sizes());
  TORCH_CHECK(weight.scalar_type() == grad.scalar_type(), "[", args.op(),
              "] weight must have dtype ", grad.scalar_type(), ", got ", weight.scalar_type());
}

}  // namespace

TensorSpec linear_output(const Args& args) {
  const Tensor& input = args.tensor(0);
  const Tensor& weight = args.tensor(1);
  check_compute_dtype(args, "input", input);
  TORCH_CHECK(weight.dim() == 2, "[", args.op(), "] weight must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(input.dim() >= 1, "[", args.op(), "] input must have at least 1 dimension, got 0");
  TORCH_CHECK(input.sym_size(-1) == weight.sym_size(1), "[", args.op(),
              "] input must have last dimension ", weight.sym_size(1), ", got shape ",
              input.sym_sizes());
  TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "[", args.op(),
              "] input must have the weight's dtype ", weight.scalar_type(), ", got ",
              input.scalar_type());
  return last_size(input, weight.sym_size(0));
}

void check_linear_bias(const Args& args, const Tensor& bias, const TensorSpec& output) {
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == output.sizes.back(), "[", args.op(),
              "] bias must have shape [", output.sizes.back(), "], got ", bias.sym_sizes());
  TORCH_CHECK(bias.scalar_type() == output.dtype, "[", args.op(), "] bias must have dtype ",
              output.dtype, ", got ", bias.scalar_type());
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

TensorSpecs linear_backward_outputs(const Args& args, size_t grad_output, size_t input,
                                    size_t weight, size_t mask, const char* input_name) {
  const Tensor& grad = args.tensor(grad_output);
  check_compute_dtype(args, "grad_output", grad);
  check_has_rows(args, "grad_output", grad);
  const TensorSpec absent{{0}, grad.scalar_type()};
  TensorSpecs specs = {absent, absent};
  if (args.flag(mask, 0)) {
    TORCH_CHECK(args.has(weight), "[", args.op(),
                "] weight must be given for grad_input, got none");
    check_backward_weight(args, args.tensor(weight), grad);
    specs[0] = last_size(grad, args.tensor(weight).sym_size(1));
  }
  if (args.flag(mask, 1)) {
    TORCH_CHECK(args.has(input), "[", args.op(), "] ", input_name,
                " must be given for grad_weight, got none");
    const Tensor& factor = args.tensor(input);
    check_has_rows(args, input_name, factor);
    check_spec(args, input_name, factor,
               args.flag(mask, 0) ? specs[0] : last_size(grad, factor.sym_size(-1)));
    specs[1] = {{grad.sym_size(-1), factor.sym_size(-1)}, grad.scalar_type()};
  }
  return specs;
}

TensorSpecs linear_backward_outputs(const Args& args, const TensorSpec& factor) {
  const Tensor& grad = args.tensor(0);
  const Tensor& input = args.tensor(1);
  const Tensor& weight = args.tensor(2);
  check_compute_dtype(args, "grad_output", grad);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == factor.sizes.back(), "[", args.op(),
              "] weight must have shape [*, ", factor.sizes.back(), "], got ", weight.sym_sizes());
  TensorSpec output = factor;
  output.sizes.back() = weight.sym_size(0);
  check_spec(args, "grad_output", grad, output);
  check_spec(args, "weight", weight, {c10::SymDimVector(weight.sym_sizes()), factor.dtype});
  return {like(input), like(weight)};
}

Tensor as_matrix(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  // Not -1: where the last dimension is empty, no number of rows follows from that of elements.
  c10::SymInt rows = 1;
  for (const auto& size : tensor.sym_sizes().slice(0, tensor.dim() - 1)) rows *= size;
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias, double scale) {
  const Tensor matrix = as_matrix(input);
  if (!bias.defined()) {
    return with_last_size(product(matrix, transposed(weight), scale), input, weight.size(0));
  }
  const Tensor output = repeat_rows(bias, matrix.size(0));
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
  // Of 16-bit numbers a product that starts from others takes longer by more than a pass.
  if (out.scalar_type() == left.scalar_type() && (!adds || out.element_size() > 2)) {
    multiply_cpu(out, left, right, /*beta=*/adds ? 1 : 0, scale);
    return;
  }
  const Tensor found = product(left, right, scale);
  adds ? out.add_(found) : out.copy_(found);
}

Tensors linear_backward_cpu(const Tensor& grad_output, Tensor input, const Tensor& weight,
                            const LinearGradients& fused) {
  const Tensor grad = as_matrix(grad_output);
  Tensors grads(2, Tensor());
  if (input.defined()) {
    input = as_matrix(input);
    if (fused.main_grad.buffer.defined()) {
      grads[1] = fused.main_grad.buffer;
      product_cpu(grads[1], transposed(grad), input, fused.main_grad.adds, fused.scale);
    } else {
      grads[1] = product(transposed(grad), input, fused.scale);
    }
    input.reset();
  }
  if (weight.defined()) {
    const Tensor sum = product(grad, weight, fused.scale, fused.residual);
    grads[0] = with_last_size(sum, grad_output, weight.size(1));
  }
  for (Tensor& result : grads) {
    if (!result.defined()) result = empty_cpu({0}, grad_output.scalar_type());
  }
  return grads;
}

Tensors linear_backward_unfused(const Tensor& grad_output, const Tensor& input,
                                const Tensor& weight) {
  Tensors results(2);
  if (weight.defined()) results[0] = at::matmul(grad_output, weight);
  if (input.defined()) results[1] = as_matrix(grad_output).t().mm(as_matrix(input));
  return results;
}

}  // namespace transformer_ops
