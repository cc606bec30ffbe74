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

}  // namespace

Tensors run(const Program& program, at::TensorList tensors) {
  check_count(program, tensors);
  if (under_functorch() || std::ranges::any_of(tensors, has_tangent)) {
    return run_unfused(program.plan, tensors);
  }
  if (program.random) preflight(program, tensors);
  const bool wants_grad =
      at::GradMode::is_enabled() &&
      std::ranges::any_of(tensors, [](const Tensor& tensor) { return tensor.requires_grad(); });
  if (wants_grad && program.plan.needs_backward()) return PlanFunction::apply(&program, tensors);
  if (wants_grad) {
    // A plan made without gradients, as in a program exported under no_grad.
    return PlanFunction::apply(&program_for(unfused_plan_for(program.plan, tensors)), tensors);
  }
  const BelowAutograd below_autograd;
  Tensors values;
  return run_forward(program, tensors, values);
}

}  // namespace transformer_ops
