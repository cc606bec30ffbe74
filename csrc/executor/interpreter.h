#pragma once

#include "executor/host.h"
#include "executor/program.h"
#include "executor/tensor_metadata.h"
#include "op/main_grad.h"

namespace transformer_ops {

// The data of one pass of one call.
struct Frame {
  Tensors values = {};
  TensorMetadataList metadata = {};
  HostCall* host = nullptr;
  // The dispatch state of the caller, which host steps run under.
  c10::impl::LocalDispatchKeySet callers = c10::impl::tls_local_dispatch_key_set();
  // Set in a backward in which gradients may be missing. `reached` marks the values that depend on
  // a given gradient: plain autograd gives none for the others.
  bool is_partial = false;
  std::vector<bool> reached = {};
  std::vector<Tensors> own = {};  // the rows of HostCall::saved()
  // Runs every op by its decomposition, which is differentiable, instead of its kernel.
  bool is_decomposed = false;
  // Compiled code may write to the results of its calls once it has no use for them.
  bool caches_weights = true;
};

// Runs the lines of one pass over the values of the frame.
void interpret(const Program& program, const Program::Code& code, Frame& frame);
// Runs only the lines of the step whose first op is `op`.
void interpret_step(const Program& program, const Program::Code& code, int op, Frame& frame);

// Excludes autograd and autocast: the gradients and casts of a plan are explicit.
class BelowAutograd {
 private:
  at::AutoDispatchBelowAutograd below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  AsksTheEngine asks_the_engine_;
};

}  // namespace transformer_ops
