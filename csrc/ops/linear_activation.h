// Backward of an activation that keeps its input and of the BasicLinear after it, in one step: what
// the fusions with and without a Bias before them share.
#pragma once

#include "ops/activation.h"
#include "ops/linear_recomputed.h"

namespace transformer_ops {

inline constexpr const char* kLinearActivationArguments =
    "Tensor grad_output, Tensor input, Tensor weight, str activation";

std::vector<std::string> activations_that_keep_input();
// Op k of the match is the activation.
Bindings bind_linear_activation(const Match& match, int k);

// Results are (grad_input, grad_weight), and where there are three, the sums of grad_input's rows.
TensorSpecs linear_activation_outputs(const Args& args);
void linear_activation_cpu(const Args& args, Tensors& results);
void linear_activation_cuda(const Args& args, Tensors& results);
Tensors linear_activation_unfused(const Args& args);

}  // namespace transformer_ops
