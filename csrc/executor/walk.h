#pragma once

#include "executor/program.h"

namespace transformer_ops {

using Shapes = std::vector<std::vector<c10::SymInt>>;

// Runs the lines of one direction over its values. `shapes` serves Program::ShapeOf.
void walk(const Program::Code& code, const Shapes& shapes, Tensors& values);

// Excludes autograd and autocast: the gradients and casts of a plan are explicit.
class BelowAutograd {
 private:
  at::AutoDispatchBelowAutograd below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace transformer_ops
