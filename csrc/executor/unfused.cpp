#include "executor/unfused.h"

#include <algorithm>

#include "fuser/planner.h"

namespace transformer_ops {

Plan unfused_plan(const Plan& plan, std::vector<TensorMeta> tensors) {
  PlanKey key{.grad_enabled = true, .autocast = plan.autocast, .tensors = std::move(tensors)};
  std::vector<OpNode> ops;
  Rewritten groups;
  for (int i = 0; i < plan.size(); ++i) {
    const PlannedOp& planned = plan.ops[i];
    const OpDeclaration& row = declaration(planned.kind);
    OpNode op{.kind = planned.kind,
              .attributes = planned.attributes,
              .extra_inputs = row.extra_inputs,
              .extra_outputs = row.extra_outputs,
              .parameters = static_cast<int>(row.parameters.size())};
    op.sources.resize(op.extra_inputs);
    for (const Route& route : plan.routes) {
      if (route.input.op != i) continue;
      op.sources[std::stoi(route.input.name)] = {route.output.op, std::stoi(route.output.name)};
    }
    for (int k = 0; k < op.extra_outputs; ++k) {
      const Value output{Value::Kind::ExtraOutput, i, std::to_string(k)};
      op.visible.push_back(std::ranges::find(plan.extra_outputs, output) !=
                           plan.extra_outputs.end());
    }
    key.training.push_back(planned.training);
    ops.push_back(std::move(op));
    groups.forward.push_back({.first = i, .name = planned.kind});
  }
  groups.backward = groups.forward;
  return lower(Analysis(ops, key), groups);
}

}  // namespace transformer_ops
