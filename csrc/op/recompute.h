// Cheap outputs computed again in backward: typed ops "recompute_<op>". Their first argument is the
// gradient that the reading step is given. They do not read its values: with it, torch.compile
// neither merges them with forward nor saves their result there.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// That of a forward whose arguments are all there in backward.
TypedOp recompute_by(TypedOp forward);

}  // namespace transformer_ops
