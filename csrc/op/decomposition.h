// Typed ops by their decomposition.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// What a typed op means in plain differentiable ATen calls; the decomposition of a backward without
// one follows from that of its forward. Throws NotImplementedError where there is none.
Tensors call_decomposition(const std::string& name, c10::ArrayRef<c10::IValue> arguments);

// The body of a typed op where nobody has written one for the device: the same, without a graph.
// Gives new tensors of these sizes and dtypes. Raises where the decomposition has other results.
Tensors run_decomposition(const std::string& name, const Checks& check, Values values,
                          const TensorSpecs& specs);

}  // namespace transformer_ops
