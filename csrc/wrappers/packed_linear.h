// Products of one input with several weights; the outputs are next to each other.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "op/typed_op.h"

namespace transformer_ops {

// The flags of the wanted results among (grad_input, grad_weight, grad_bias).
using PackedMask = std::array<bool, 3>;
// Lists that are not wanted are empty.
using PackedBackward = std::tuple<Tensor, Tensors, Tensors>;

// `columns`: the number of output columns of each weight. A weight is [its columns, columns of the
// input], and a bias, if there are any, is [its columns]. Raises if they do not fit.
TensorSpec packed_linear_output(const Checks& check, const Tensor& input, const Tensors& weight,
                                const Tensors& bias, at::IntArrayRef columns);
TensorSpecs packed_linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                           const Tensor* input, const Tensors& weight,
                                           at::IntArrayRef columns, PackedMask wanted);

// The tensors as one view, if all are contiguous and adjacent in one storage; else undefined. It is
// never a copy.
Tensor joined(const Tensors& tensors);

// Splits the first dimension of new memory, which is freed with the last part. Each part has its
// own storage, so that none is an alias of another.
Tensors runs_of(const Tensor& whole, at::IntArrayRef counts);

Tensor packed_linear_cpu(const Tensor& input, const Tensors& weight, const Tensors& bias,
                         at::IntArrayRef columns);
Tensor packed_linear_cuda(const Tensor& input, const Tensors& weight, const Tensors& bias,
                          at::IntArrayRef columns);
Tensor packed_linear_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias);

// On the CPU the gradients of all weights share one allocation, one after another, but each has its
// own storage, unless they go into main_grad. The same holds for the biases. The input's memory is
// released before grad_input is allocated, if it has no other reference.
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
