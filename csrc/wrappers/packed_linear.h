// Products of one input with several weights, whose outputs stand side by side.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "op/typed_op.h"

namespace transformer_ops {

// Which of (grad_input, grad_weight, grad_bias) are wanted.
using PackedMask = std::array<bool, 3>;
// Lists that are not wanted are empty.
using PackedBackward = std::tuple<Tensor, Tensors, Tensors>;

// `columns`: of the output of each weight. A weight is [its columns, columns of the input], and a
// bias, where there are any, is [its columns]. Raises where they do not fit.
TensorSpec packed_linear_output(const Checks& check, const Tensor& input, const Tensors& weight,
                                const Tensors& bias, at::IntArrayRef columns);
TensorSpecs packed_linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                           const Tensor* input, const Tensors& weight,
                                           at::IntArrayRef columns, PackedMask wanted);

// The tensors as one, where each is contiguous and starts where the one before it ends, in the same
// storage; else undefined. Never a copy.
Tensor joined(const Tensors& tensors);

Tensor packed_linear_cpu(const Tensor& input, const Tensors& weight, const Tensors& bias,
                         at::IntArrayRef columns);
Tensor packed_linear_cuda(const Tensor& input, const Tensors& weight, const Tensors& bias,
                          at::IntArrayRef columns);
Tensor packed_linear_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias);

// On the CPU the gradients of all weights lie in one allocation, one behind another, each as a
// storage of its own, unless they go into main_grad; so do those of all biases. The input's memory
// is given back before grad_input is made, if nobody else holds it.
PackedBackward packed_linear_backward_cpu(const Tensor& grad_output, std::optional<Tensor> input,
                                          const Tensors& weight, at::IntArrayRef columns,
                                          PackedMask wanted, const MainGrad& main_grad);
PackedBackward packed_linear_backward_cuda(const Tensor& grad_output, std::optional<Tensor> input,
                                           const Tensors& weight, at::IntArrayRef columns,
                                           PackedMask wanted, const MainGrad& main_grad);
PackedBackward packed_linear_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                 const Tensors& weight, at::IntArrayRef columns,
                                                 PackedMask wanted);

}  // namespace transformer_ops
