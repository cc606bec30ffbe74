#include "executor/unfused.h"

#include <algorithm>

#include "fuser/planner.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;
using torch::jit::Stack;

c10::IValue load(const Argument& argument, const std::map<Value, Tensor>& values) {
  if (const auto* value = std::get_if<Value>(&argument)) return values.at(*value);
  if (const auto* constant = std::get_if<Attribute>(&argument)) return to_ivalue(*constant);
  return {};
}

Tensors call_torch(const std::string& name, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(stack);
  Tensors results;
  for (auto& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

void cast(const Step& step, const Value& value, std::map<Value, Tensor>& values) {
  Tensor& tensor = values.at(value);
  tensor = cast_floating(step.name.c_str(), tensor, to_torch(*step.compute));
}

}  // namespace

Plan unfused_plan(const Plan& plan, const std::vector<TensorFacts>& facts) {
  Facts all{.grad_enabled = true, .input = facts[0], .autocast = plan.autocast};
  const auto extra_inputs = facts.begin() + 1;
  all.extra_inputs.assign(extra_inputs, extra_inputs + plan.extra_inputs.size());
  auto next_parameter = extra_inputs + plan.extra_inputs.size();
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
      const Value output{Kind::ExtraOutput, i, std::to_string(k)};
      op.visible.push_back(std::ranges::find(plan.extra_outputs, output) !=
                           plan.extra_outputs.end());
    }
    all.parameters.emplace_back(next_parameter, next_parameter + op.parameters);
    next_parameter += op.parameters;
    all.training.push_back(planned.training);
    ops.push_back(std::move(op));
    groups.forward.push_back({.first = i, .name = planned.kind});
  }
  groups.backward = groups.forward;
  return lower(ops, all, groups);
}

void run_unfused_step(const Step& step, std::map<Value, Tensor>& values) {
  if (step.compute) {
    cast(step, {Kind::Main, step.first()}, values);
    for (auto& [value, tensor] : values) {
      const bool is_mine = value.kind == Kind::Parameter && value.op == step.first();
      if (is_mine && step.cast_parameters) tensor = tensor.to(to_torch(*step.compute));
    }
  }
  for (const Instruction& instruction : step.instructions) {
    Stack stack;
    for (const Argument& argument : instruction.arguments) {
      stack.push_back(load(argument, values));
    }
    Tensors results;
    if (instruction.target.empty()) {
      results.assign(instruction.results.size(), stack[0].toTensor());
    } else if (instruction.target.find("::") != std::string::npos) {
      results = call_torch(instruction.target, std::move(stack));
    } else {
      results = call_unfused(instruction.target, stack);
    }
    for (size_t i = 0; i < results.size(); ++i) values[instruction.results[i]] = results[i];
  }
}

}  // namespace transformer_ops
