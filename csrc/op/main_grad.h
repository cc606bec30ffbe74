// Checks and fills main_grad, the buffer for the gradient of a weight (MainGrad of op/body.h).
#pragma once

#include "op/body.h"

namespace transformer_ops {

// Raises if a buffer does not fit its weight, or shares memory with an argument.
void check_main_grad(const Call& call, Values values, const TensorSpec& grad_weight);

// While an object of this class exists, the thread runs a plan, which has already asked the
// autograd engine which gradients are wanted.
class AsksTheEngine {
 public:
  AsksTheEngine();
  ~AsksTheEngine();
  AsksTheEngine(const AsksTheEngine&) = delete;
  AsksTheEngine& operator=(const AsksTheEngine&) = delete;

 private:
  bool before_;
};

// Raises in compiled code if the engine wants some gradients of a backward, but not that of the
// weight: compiled code computes all of them.
void check_asked(const Call& call);

// Puts the result at index `place`, which was computed elsewhere, into main_grad.
void put(const MainGrad& main_grad, const Results& results, size_t place);

// Tells autograd that the buffers were modified.
void bump_versions(const MainGrad& main_grad);

}  // namespace transformer_ops
