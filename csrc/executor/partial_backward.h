// The backward for a subset of the gradients, as torch.autograd.grad() asks for.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "executor/program.h"

namespace transformer_ops {

// The lines of backward that the wanted gradients need, and the values that need not be loaded.
struct PartialBackward {
  Program::Code code;
  std::vector<int> unread;  // loaded values that none of the lines reads
};

// `wanted`: for each input of the program, is its gradient wanted?
PartialBackward partial_backward(const Program& program, const std::vector<bool>& wanted);

// A cache of the partial backwards of one program.
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
