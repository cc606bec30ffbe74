// The backward of an activation or GLU and of the BasicLinear after it. The product's input, y, is
// recomputed in the same pass that computes the gradient of the activation's input.
#pragma once

#include <c10/util/FunctionRef.h>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// The reason why such a rule does not apply, or none. Op k of the match is the activation or GLU.
std::optional<std::string> why_not_recomputed(const Match& match, int k);

// The parts of the product that the wanted gradients need: the gradient of its input y, and y
// itself.
struct RecomputedParts {
  bool grad_y;  // multiplies by the weight
  bool weight;  // multiplies by y
};

// Computes grad_weight in slices of a multiple of `unit` columns, so that y never exists as a
// whole. A slice first holds y's gradient, and then y. pass(buffer, first): `buffer` holds y's
// gradient from column `first` on, or zeros if it is not wanted, and receives y. `before`: the
// number of columns of the Linear's own input.
void linear_recomputed_cpu(const Call& call, const Tensor& grad_output, const Tensor& weight,
                           RecomputedParts wanted, const Tensor& grad_weight, int64_t before,
                           int64_t unit,
                           c10::function_ref<void(const Tensor& buffer, int64_t first)> pass);

// (grad_input, grad_weight), where y = function(input). Gradients that are not wanted are
// undefined.
std::tuple<Tensor, Tensor> linear_recomputed_decomposed(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, RecomputedParts wanted,
    c10::function_ref<Tensor(const Tensor&)> function);

}  // namespace transformer_ops
