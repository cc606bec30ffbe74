// Norms computed again in backward (op/recompute.h).
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// What a norm's output follows from. Null where the norm has none.
struct NormTensors {
  const Tensor& input;
  const Tensor* mean;
  const Tensor& rstd;
  const Tensor* weight;
  const Tensor* bias;
  bool zero_centered_gamma = false;
};

// The typed op that computes a norm's output again, from its statistics. `tensors` reads the
// arguments of `schema`.
TypedOp recompute_norm(const std::string& schema, NormTensors (*tensors)(const Args&));

}  // namespace transformer_ops
