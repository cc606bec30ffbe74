#include "executor/run.h"

#include <algorithm>

#include "executor/plan_function.h"
#include "executor/preflight.h"
#include "executor/unfused.h"
#include "executor/walk.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

void check_count(const Program& program, at::TensorList tensors) {
  TORCH_CHECK(tensors.size() == program.inputs.size(), "[run_plan] tensors must be 1 input, ",
              program.plan.extra_inputs.size(), " extra inputs and ",
              program.plan.parameters.size(), " parameters, got ", tensors.size(), " in all");
}

bool under_functorch() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

Plan unfused_plan_for(const Plan& plan, at::TensorList tensors) {
  std::vector<TensorFacts> facts;
  for (const Tensor& tensor : tensors) {
    facts.push_back({to_dtype(tensor.scalar_type()), tensor.requires_grad()});
  }
  return unfused_plan(plan, facts);
}

Tensors run_unfused(const Plan& fused, at::TensorList tensors) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Plan plan = unfused_plan_for(fused, tensors);
  std::map<Value, Tensor> values;
  values[{Kind::Main, 0}] = tensors[0];
  size_t next = 1;
  for (const Value& value : plan.extra_inputs) values[value] = tensors[next++];
  for (const Value& value : plan.parameters) values[value] = tensors[next++];
  for (const Step& step : plan.forward) run_unfused_step(step, values);
  Tensors outputs = {values.at({Kind::Main, plan.size()})};
  for (const Value& output : plan.extra_outputs) outputs.push_back(values.at(output));
  return outputs;
}

// Does backward yield a gradient for every tensor that wants one?
bool serves(const Program& program, at::TensorList tensors) {
  if (!program.plan.needs_backward()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad() && program.input_grads[i] < 0) return false;
  }
  return true;
}

// The outputs of the node, among which those that need no gradient take their places.
Tensors run_differentiable(const SharedProgram& program, at::TensorList tensors) {
  Tensors constants;
  Tensors outputs = PlanFunction::apply(program, &constants, tensors);
  outputs.insert(outputs.begin() + 1, std::make_move_iterator(constants.begin()),
                 std::make_move_iterator(constants.end()));
  return outputs;
}

}  // namespace

Tensors run(const SharedProgram& program, at::TensorList tensors) {
  check_count(*program, tensors);
  if (under_functorch() || std::ranges::any_of(tensors, has_tangent)) {
    return run_unfused(program->plan, tensors);
  }
  if (program->random) preflight(*program, tensors);
  Tensors values;
  // What plain torch does with views, also when they are modified in place.
  if (program->only_views) return run_forward(*program, tensors, values);
  const bool wants_grad =
      at::GradMode::is_enabled() &&
      std::ranges::any_of(tensors, [](const Tensor& tensor) { return tensor.requires_grad(); });
  if (wants_grad) {
    if (serves(*program, tensors)) return run_differentiable(program, tensors);
    // A plan that was made for other flags, as in an exported program.
    return run_differentiable(unfused_program_for(*program, tensors), tensors);
  }
  const BelowAutograd below_autograd;
  return run_forward(*program, tensors, values);
}

}  // namespace transformer_ops
