// The gradient of a weight that goes into main_grad: MainGrad of op/body.h, checked and filled.
#pragma once

#include "op/body.h"

namespace transformer_ops {

// Raises where a buffer does not fit its weight, or shares memory with an argument.
void check_main_grad(const Call& call, Values values, const TensorSpec& grad_weight);

// While one lives, the thread runs a plan, which has asked the engine what is wanted.
class AsksTheEngine {
 public:
  AsksTheEngine();
  ~AsksTheEngine();
  AsksTheEngine(const AsksTheEngine&) = delete;
  AsksTheEngine& operator=(const AsksTheEngine&) = delete;

 private:
  bool before_;
};

// Raises in compiled code, which gives all gradients of its backward, where the engine is asked for
// some of them and not for that of the weight. The weight is one of this shape.
void check_asked(const Call& call);

// Puts the result at `place` there, which was made elsewhere.
void put(const MainGrad& main_grad, const Results& results, size_t place);

// Tells autograd that the buffers were written.
void bump_versions(const MainGrad& main_grad);

}  // namespace transformer_ops
