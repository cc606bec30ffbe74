// Backward of a BasicLinear whose input came from an activation or a GLU, together with that op's:
// the product's input, y, is computed again in the pass that gives the gradient of its own input.
#pragma once

#include <c10/util/FunctionRef.h>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Why such a rule does not fire, or none. Op k of the match is the activation or GLU.
std::optional<std::string> why_not_recomputed(const Match& match, int k);

// grad_weight, unless it is undefined, by slices of a multiple of `unit` columns, each of which is
// y's gradient first and then y, so that a wide one is never there as a whole. pass(buffer, first):
// `buffer` holds y's gradient from column `first` on, and takes y. `before`: the columns of the
// Linear's own input.
void linear_recomputed_cpu(const Call& call, const Tensor& grad_output, const Tensor& weight,
                           const Tensor& grad_weight, int64_t before, int64_t unit,
                           c10::function_ref<void(const Tensor& buffer, int64_t first)> pass);

// (grad_input, grad_weight), where y = function(input); grad_weight is undefined if it is not
// wanted.
std::tuple<Tensor, Tensor> linear_recomputed_unfused(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, bool wants_weight,
    c10::function_ref<Tensor(const Tensor&)> function);

}  // namespace transformer_ops
