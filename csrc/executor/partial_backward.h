// Backward where the engine asks for some of the gradients only, as torch.autograd.grad() does.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "executor/program.h"

namespace transformer_ops {

// The lines of backward that lead to the wanted gradients, and what they need not load.
struct PartialBackward {
  Program::Code code;
  std::vector<int> unread;  // loaded values that none of the lines reads
};

// `wanted`: for each of the program's inputs, whether its gradient is.
PartialBackward partial_backward(const Program& program, const std::vector<bool>& wanted);

// Caches the partial backwards of one program that were asked for.
class PartialBackwards {
 public:
  std::shared_ptr<const PartialBackward> find_or_make(const Program& program,
                                                      const std::vector<bool>& wanted);

 private:
  using Rows = std::map<std::vector<bool>, std::shared_ptr<const PartialBackward>>;

  std::shared_ptr<const PartialBackward> find(const std::vector<bool>& wanted);

  Rows rows_;
};

}  // namespace transformer_ops
