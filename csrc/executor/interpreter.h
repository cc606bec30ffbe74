#pragma once

#include "executor/host.h"
#include "executor/program.h"
#include "executor/tensor_metadata.h"
#include "op/main_grad.h"

namespace transformer_ops {

// What one pass of one call works on.
struct Frame {
  Tensors values = {};
  TensorMetadataList metadata = {};
  HostCall* host = nullptr;
  // What host steps run under: the state of whoever called.
  c10::impl::LocalDispatchKeySet callers = c10::impl::tls_local_dispatch_key_set();
  // Of a backward in which gradients may be missing: the values that depend on one that is there.
  // Plain autograd gives none for the others.
  bool is_partial = false;
  std::vector<bool> reached = {};
  std::vector<Tensors> own = {};  // the rows of HostCall::saved()
  // Runs the decomposition of every op, which is differentiable, instead of its kernel.
  bool is_decomposed = false;
};

// Runs the lines of one pass over the values of the frame.
void interpret(const Program& program, const Program::Code& code, Frame& frame);
// Those of the step alone whose first op is `op`.
void interpret_step(const Program& program, const Program::Code& code, int op, Frame& frame);

// Excludes autograd and autocast: the gradients and casts of a plan are explicit.
class BelowAutograd {
 private:
  at::AutoDispatchBelowAutograd below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  AsksTheEngine asks_the_engine_;
};

}  // namespace transformer_ops
