// Runs typed ops by their decomposition.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "op/typed_op.h"

namespace transformer_ops {

// Kernel wrappers run below autograd. While one of these lives, a wrapper may differentiate ATen
// calls; no graph is kept of what it computes.
class WithAutograd {
 public:
  WithAutograd() : keys_(keys()) {}

 private:
  static c10::impl::LocalDispatchKeySet keys();

  const c10::impl::ForceDispatchKeyGuard keys_;
  const at::AutoGradMode no_graph_{false};
};

// Runs a typed op in plain differentiable ATen calls. A backward without a decomposition is derived
// from that of its forward. Throws NotImplementedError if neither has one.
Tensors call_decomposition(const std::string& name, c10::ArrayRef<c10::IValue> arguments);

// Stands in for a kernel wrapper that the device does not have: the decomposition, without a graph.
// Returns new tensors of these sizes and dtypes; raises if the decomposition gives others.
Tensors run_decomposition(const std::string& name, const Checks& check, Values values,
                          const TensorSpecs& specs);

}  // namespace transformer_ops
