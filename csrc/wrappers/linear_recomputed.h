// Backward of a BasicLinear whose input came from an activation or a GLU, together with that op's:
// the product's input, y, is computed again in the pass that gives the gradient of its own input.
#pragma once

#include <c10/util/FunctionRef.h>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Why such a rule does not fire, or none. Op k of the match is the activation or GLU.
std::optional<std::string> why_not_recomputed(const Match& match, int k);

// What of a product the gradients read that are wanted: the gradient of its input y, and y itself.
struct RecomputedParts {
  bool grad_y;  // multiplies by the weight
  bool weight;  // multiplies by y
};

// grad_weight by slices of a multiple of `unit` columns, each of which is y's gradient first and
// then y, so that a wide one is never there as a whole. pass(buffer, first): `buffer` holds y's
// gradient from column `first` on, or zeros if nobody wants it, and takes y. `before`: the columns
// of the Linear's own input.
void linear_recomputed_cpu(const Call& call, const Tensor& grad_output, const Tensor& weight,
                           RecomputedParts wanted, const Tensor& grad_weight, int64_t before,
                           int64_t unit,
                           c10::function_ref<void(const Tensor& buffer, int64_t first)> pass);

// (grad_input, grad_weight), where y = function(input); undefined what is not wanted.
std::tuple<Tensor, Tensor> linear_recomputed_decomposed(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, RecomputedParts wanted,
    c10::function_ref<Tensor(const Tensor&)> function);

}  // namespace transformer_ops
