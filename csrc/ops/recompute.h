// Cheap outputs computed again in backward: typed ops "recompute_<op>". Their first argument is the
// gradient that the reading step is given. They do not read its values: with it, torch.compile
// neither merges them with forward nor saves their result there.
#pragma once

#include "ops/typed_op.h"

namespace transformer_ops {

// That of a forward whose arguments are all there in backward.
TypedOp recompute_by(const TypedOp& forward);

// What a norm's output follows from. Null where the norm has none.
struct NormTensors {
  const Tensor& input;
  const Tensor* mean;
  const Tensor& rstd;
  const Tensor* weight;
  const Tensor* bias;
  bool zero_centered_gamma = false;
};
// That of a norm, from its statistics. `tensors` reads the arguments of `schema`.
TypedOp recompute_norm(const std::string& schema, NormTensors (*tensors)(const Args&));

}  // namespace transformer_ops
