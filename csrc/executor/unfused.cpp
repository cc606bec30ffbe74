#include "executor/unfused.h"

#include "fuser/planner.h"

namespace transformer_ops {

namespace {

using Kind = Value::Kind;

// The tensors of a key, including those that are None, which a plan does not list.
std::vector<TensorMeta> with_absent(const Plan& plan, const std::vector<OpNode>& ops,
                                    const std::vector<TensorMeta>& tensors) {
  std::vector<TensorMeta> all = {tensors[0]};
  auto next = tensors.begin() + 1;
  const auto add = [&](bool is_there) {
    all.push_back(is_there ? *next++ : TensorMeta{.is_absent = true});
  };
  for (int i = 0; i < plan.size(); ++i) {
    for (size_t k = 0; k < ops[i].extra_inputs.size(); ++k) {
      if (ops[i].sources[k]) continue;
      add(has_value(plan.extra_inputs, {Kind::ExtraInput, i, ops[i].extra_inputs[k]}));
    }
  }
  for (int i = 0; i < plan.size(); ++i) {
    for (const std::string& name : ops[i].parameters) {
      add(has_value(plan.parameters, {Kind::Parameter, i, name}));
    }
  }
  return all;
}

// Uses the states of the plan, because the caller passes these. If its scales are frozen, and it
// does not update a state, the unfused plan must not, either.
void keep_states(const Plan& plan, Plan& unfused) {
  for (auto* steps : {&unfused.forward, &unfused.backward}) {
    for (Step& step : *steps) {
      for (Instruction& instruction : step.instructions) {
        for_each_value(instruction.results, [&](Value& result) {
          const bool is_other =
              has_value(unfused.states, result) && !has_value(plan.states, result);
          if (is_other) result.kind = Kind::Temporary;
        });
      }
    }
  }
  unfused.states = plan.states;
}

}  // namespace

Plan unfused_plan(const Plan& plan, const std::vector<TensorMeta>& tensors) {
  PlanKey key{.grad_enabled = true,
              .decomposed = true,
              .policies = {.saved = plan.saved},
              .autocast = plan.autocast,
              .recipe = plan.recipe};
  std::vector<OpNode> ops;
  Rewritten groups;
  for (int i = 0; i < plan.size(); ++i) {
    const PlannedOp& planned = plan.ops[i];
    OpNode op = make_op(planned.kind, planned.attributes);
    for (const auto& [input, output] : plan.routes) {
      if (input.op != i) continue;
      op.sources[position_of(op.extra_inputs, input.name)] = {
          output.op, position_of(plan.ops[output.op].extra_outputs, output.name)};
    }
    for (size_t k = 0; k < op.extra_outputs.size(); ++k) {
      op.visible[k] = has_value(plan.extra_outputs, {Kind::ExtraOutput, i, op.extra_outputs[k]});
    }
    key.training.push_back(planned.training);
    ops.push_back(std::move(op));
    groups.forward.push_back({.first = i, .name = planned.kind});
  }
  key.tensors = with_absent(plan, ops, tensors);
  groups.backward = groups.forward;
  Plan unfused = lower(Analysis(ops, key), groups);
  keep_states(plan, unfused);
  return unfused;
}

}  // namespace transformer_ops
