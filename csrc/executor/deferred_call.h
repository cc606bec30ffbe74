#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "executor/host.h"

namespace transformer_ops {

// The call of a typed op that computes a weight's gradient after backward. It owns the arguments,
// and throws if one of them was modified in place in the meantime.
class DeferredCall {
 public:
  struct Op {
    c10::OperatorHandle op;
    std::optional<c10::OperatorHandle> into;  // writes the gradient into a buffer
    int result;  // the index of the result that is the gradient, or a list of them
    std::vector<bool> wanted = {true};  // for each of its tensors
  };

  DeferredCall(Op op, const torch::jit::Stack& arguments);

  // The gradients of the weight's tensors; undefined if backward did not have to compute one.
  std::vector<at::Tensor> run() const;
  // Returns false, and does nothing, if the op cannot, or if not all gradients are wanted.
  bool run_into(const Accumulation& target) const;

 private:
  torch::jit::Stack checked_arguments() const;

  const Op op_;
  torch::jit::Stack arguments_;
  std::vector<uint32_t> versions_;  // for each argument; 0 if it is no tensor
};

// Pushes the arguments that op <name>_into has besides those of <name>: the buffer, or a list of
// them, and whether it is overwritten.
void push_accumulation(const Accumulation& target, const c10::OperatorHandle& into,
                       torch::jit::Stack& stack);

}  // namespace transformer_ops
