// Backward of a BasicLinear whose input came from an activation or a GLU, together with that op's:
// the product's input, y, is computed again in the pass that gives the gradient of its own input.
// Arguments are (grad_output, input, weight, ...), results (grad_input, grad_weight, ...).
#pragma once

#include <c10/util/FunctionRef.h>

#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Why such a rule does not fire, or none. Op k of the match is the activation or GLU.
std::optional<std::string> why_not_recomputed(const Match& match, int k);

// By slices of a multiple of `unit` columns, each of which is y's gradient first and then y, so
// that a wide one is never there as a whole. pass(buffer, first): `buffer` holds y's gradient from
// column `first` on, and takes y.
void linear_recomputed_cpu(const Args& args, Tensors& results, int64_t unit,
                           c10::function_ref<void(const Tensor& buffer, int64_t first)> pass);

Tensors linear_recomputed_unfused(const Args& args,
                                  const std::function<Tensor(const Tensor&)>& function);

}  // namespace transformer_ops
