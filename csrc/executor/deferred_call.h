#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "executor/host.h"

namespace transformer_ops {

// The call of a typed op that gives the gradient of a weight, which backward left for later. Holds
// its arguments. Throws where one of them was modified in place since.
class DeferredCall {
 public:
  struct Op {
    c10::OperatorHandle op;
    std::optional<c10::OperatorHandle> into;  // puts it into a buffer
    int result;                               // which one is the gradient, or a list of them
    std::vector<bool> wanted = {true};        // of each of its tensors
  };

  DeferredCall(Op op, const torch::jit::Stack& arguments);

  // The gradients of the tensors of the weight; undefined where backward was not asked for one.
  std::vector<at::Tensor> run() const;
  // False where the op cannot, or not all are wanted: nothing has happened then.
  bool run_into(const Accumulation& target) const;

 private:
  torch::jit::Stack checked_arguments() const;

  const Op op_;
  torch::jit::Stack arguments_;
  std::vector<uint32_t> versions_;  // of each argument; 0 for what is no tensor
};

// The arguments that an op <name>_into has beside those of <name>: the buffer, or a list of them,
// and whether it is overwritten.
void push_accumulation(const Accumulation& target, const c10::OperatorHandle& into,
                       torch::jit::Stack& stack);

}  // namespace transformer_ops
