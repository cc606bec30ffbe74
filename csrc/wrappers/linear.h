// Products and their checks, shared by BasicLinear and the fused ops that contain one.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises where the two do not fit.
TensorSpec linear_output(const Checks& check, const Tensor& input, const Tensor& weight);

// The bias of a fused Linear + Bias: one number an output feature, in the output's dtype.
void check_linear_bias(const Checks& check, const Tensor& bias, const TensorSpec& output);

// A factor as ATen multiplies tensors of that dtype by it: what float32 does not hold is infinite.
// A product takes none that its dtype does not hold.
double factor_of(at::ScalarType dtype, double scale);

// Why a rule whose pattern starts with BasicLinear + Bias does not fire, or none.
std::optional<std::string> different_linear_dtypes(const Match& match);

// Which of (grad_input, grad_weight) are wanted.
using LinearMask = std::array<bool, 2>;

// (grad_input, grad_weight); one that is not wanted is empty. `input` and `weight` may be absent,
// or anything, where the mask does not ask for what they serve.
TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor* input, const Tensor* weight, LinearMask wanted,
                                    const char* input_name = "input");

// The same where both are wanted; `factor`: what the product is of, the input or what an op makes
// of it.
TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor& input, const Tensor& weight,
                                    const TensorSpec& factor);

// All leading dimensions as one; there is at least one dimension.
Tensor as_matrix(const Tensor& tensor);
// The way back, with another last dimension.
Tensor with_last_size(const Tensor& matrix, const Tensor& like, int64_t size);

// A product of operands that are multiples of what they stand for, times `scale`. What float32 does
// not hold of the factor, a power of two, is in the left operand: both are exact.
struct ScaledOperand {
  Tensor tensor;
  double factor;
};
ScaledOperand scaled_operand(const Tensor& left, const OperandScales& scales, double scale = 1.0);

// A matrix of which every row is the bias: where the sums of a product start.
Tensor repeat_rows_cpu(const Tensor& row, int64_t count);

// scale x W^T [+ b] for any number of leading dimensions; the bias is contiguous.
Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                  double scale = 1.0);

// start + scale x W^T in the memory of `start`, which is contiguous.
Tensor add_linear_cpu(const Tensor& start, const Tensor& input, const Tensor& weight,
                      double scale = 1.0);

// scale left right into `out` of any dtype, or added to what is there.
void product_cpu(const Tensor& out, const Tensor& left, const Tensor& right, bool adds,
                 double scale = 1.0);

// What is done to the gradients on the way.
struct LinearGradients {
  double scale = 1.0;    // of both
  Tensor residual = {};  // is added to grad_input
  MainGrad main_grad = {};
  OperandScales scales = {};  // on CUDA, of the one product that is wanted
};

// What linear_backward_* multiply: undefined where nobody wants the gradient that it serves.
inline Tensor factor(bool wanted, const Tensor* tensor) { return wanted ? *tensor : Tensor(); }
inline Tensor factor(bool wanted, std::optional<Tensor> tensor) {
  return wanted ? *std::move(tensor) : Tensor();
}

// (grad_input, grad_weight). An undefined input or weight gives an empty gradient for the other.
// The weight's may be main_grad. The input's memory is given back before the gradient for it is
// made, if nobody else holds it.
using LinearBackward = std::tuple<Tensor, Tensor>;
LinearBackward linear_backward_cpu(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                   const LinearGradients& fused = {});
LinearBackward linear_backward_decomposed(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& weight);

}  // namespace transformer_ops
