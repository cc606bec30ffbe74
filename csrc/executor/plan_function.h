#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include "executor/interpreter.h"

namespace transformer_ops {

// One call, and the tensors that take the outputs without a gradient, which the node does not
// return.
struct PlanCall {
  const SharedProgram& program;
  const SharedHostCall& host;  // or none
  at::TensorList tensors;      // in the order of the plan
  Tensors& constants;
  // The plan in one line, if a trace records one op for each pass; else empty.
  std::string_view recorded = {};

  // The inputs of the node. States have no gradient, and each input of a node costs time.
  at::TensorList inputs() const {
    return tensors.slice(0, tensors.size() - program->plan.states.size());
  }
};

// The autograd node of a whole plan. Inputs: the call, then its inputs().
class PlanFunction : public torch::autograd::Function<PlanFunction> {
 public:
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const PlanCall& call, at::TensorList inputs);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads);
};

// The same for programs with host steps, whose methods may read tensors that compiled autograd does
// not know.
class HostPlanFunction : public torch::autograd::Function<HostPlanFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const PlanCall& call, at::TensorList inputs) {
    return PlanFunction::forward(context, call, inputs);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return PlanFunction::backward(context, grads);
  }
};

// Runs the forward lines and returns the outputs; the frame holds what may be saved. A trace
// records one op for a plan that is given in one line, if it can.
Tensors run_forward(const Program& program, at::TensorList tensors, Frame& frame,
                    std::string_view recorded = {});

// The backward of PlanFunction under create_graph=True: the gradients of the program's inputs, as a
// differentiable function of the inputs and `grads`, some of which may be undefined. The ops are
// replayed unfused from saved tensors. `wanted`: for each input, is its gradient wanted? Empty if
// all are.
Tensors double_backward(const Program& program, const Tensors& saved, const Tensors& grads,
                        const std::vector<bool>& wanted);

}  // namespace transformer_ops
