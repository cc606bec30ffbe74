// Products and their checks, shared by BasicLinear and the fused ops that contain it.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises if input and weight do not fit, or the bias is not one number for each output feature in
// the output's dtype.
TensorSpec linear_output(const Checks& check, const Tensor& input, const Tensor& weight,
                         const Tensor* bias = nullptr);

// Shape and decomposition of a typed op that is only a product with its bias.
TensorSpecs linear_bias_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                              const Tensor& bias);
Tensor linear_bias_decomposed(const Tensor& input, const Tensor& weight, const Tensor& bias);

// The factor by which ATen multiplies tensors of that dtype: one that float32 cannot hold becomes
// infinite. A product does not accept a factor that its dtype cannot hold.
double factor_of(at::ScalarType dtype, double scale);

// The reason why a rule whose pattern starts with BasicLinear + Bias does not apply, or none.
std::optional<std::string> different_linear_dtypes(const Match& match);

// The flags of the wanted results among (grad_input, grad_weight).
using LinearMask = std::array<bool, 2>;

// (grad_input, grad_weight); one that is not wanted is empty. `input` or `weight` is not read, and
// may be null, if the gradient that needs it is not wanted.
TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor* input, const Tensor* weight, LinearMask wanted,
                                    const char* input_name = "input");

// The same if both are wanted. `factor`: the product's operand, which is the input or computed from
// it.
TensorSpecs linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                    const Tensor& input, const Tensor& weight,
                                    const TensorSpec& factor);

// Joins all leading dimensions; there must be at least one dimension.
Tensor as_matrix(const Tensor& tensor);
// The inverse of as_matrix(), with another last dimension.
Tensor with_last_size(const Tensor& matrix, const Tensor& like, int64_t size);

// An operand of a product with scales, and the product's factor. If float32 cannot hold the factor,
// a power of two is moved to the left operand; both are exact.
struct ScaledOperand {
  Tensor tensor;
  double factor;
};
ScaledOperand scaled_operand(const Tensor& left, const OperandScales& scales, double scale = 1.0);

// A matrix of which every row is the bias, from which the sums of a product start.
Tensor repeat_rows_cpu(const Tensor& row, int64_t count);

// scale x W^T [+ b] for any number of leading dimensions; the bias is contiguous.
Tensor linear_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                  double scale = 1.0);

// start + scale x W^T in the memory of `start`, which is contiguous.
Tensor add_linear_cpu(const Tensor& start, const Tensor& input, const Tensor& weight,
                      double scale = 1.0);

// scale left right into `out` of any dtype, or added to it.
void product_cpu(const Tensor& out, const Tensor& left, const Tensor& right, bool adds,
                 double scale = 1.0);

// What is fused with the computation of the gradients.
struct LinearGradients {
  double scale = 1.0;    // for both gradients
  Tensor residual = {};  // is added to grad_input
  MainGrad main_grad = {};
  OperandScales scales = {};  // on CUDA, for the one product that is wanted
};

// The operands of linear_backward_*: undefined if the gradient that needs one is not wanted.
inline Tensor factor(bool wanted, const Tensor* tensor) { return wanted ? *tensor : Tensor(); }
inline Tensor factor(bool wanted, std::optional<Tensor> tensor) {
  return wanted ? *std::move(tensor) : Tensor();
}

// (grad_input, grad_weight). If an input or weight is undefined, the gradient that needs it is
// empty. The weight's gradient may be main_grad. The input's memory is released before grad_input
// is allocated, if it has no other reference.
using LinearBackward = std::tuple<Tensor, Tensor>;
LinearBackward linear_backward_cpu(const Tensor& grad_output, Tensor input, const Tensor& weight,
                                   const LinearGradients& fused = {});
LinearBackward linear_backward_decomposed(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& weight);

}  // namespace transformer_ops
