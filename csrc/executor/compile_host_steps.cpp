// How the steps of a plan that the host language runs become lines of a program.
#include <algorithm>

#include "executor/compiler.h"
#include "executor/host_results.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

}  // namespace

void Compiler::compile_host_forward(const Step& step) {
  const Plan& plan = program_.plan;
  Program::HostForward call{.step = forward_step_++, .name = step.name};
  const auto define = [&](const Value& value) {
    call.names.push_back(value);
    call.results.push_back(forward_.define(value));
  };
  const auto is_outside = [&](const std::optional<Value>& source) {
    return source && (source->kind == Kind::ExtraInput || source->op < step.first());
  };
  call.arguments.push_back(forward_.find({Kind::Main, step.first()}));
  for (const int op : step.ops) {
    for (const auto& source : extra_inputs(op)) {
      call.arguments.push_back(is_outside(source) ? forward_.find(*source) : -1);
    }
    call.dtypes.push_back(dtype_of(op));
  }
  define({Kind::Main, step.last() + 1});
  for (const int op : step.ops) {
    for (const std::string& name : plan.ops[op].extra_outputs) {
      define({Kind::ExtraOutput, op, name});
    }
  }
  for (const int op : step.ops) {
    if (program_.keeps_own[op]) continue;
    for (const std::string& name : slots_of(op)) {
      const Value value{Kind::Slot, op, name};
      define(value);
      if (op >= plan.first_backward) sources_[value] = call.results.back();
    }
  }
  call.native = NativeResults::of(plan, step);
  if (call.native) {
    for (const Value& name : call.native->parameters()) {
      call.parameters.push_back(forward_.find(name));
    }
  }
  program_.forward.lines.push_back({std::move(call)});
}

std::vector<std::string> Compiler::slots_of(int op) const {
  const PlannedOp& planned = program_.plan.ops[op];
  return declaration(planned.kind).slot_tensors(planned.attributes);
}

Program::HostForward::OpDtype Compiler::dtype_of(int op) const {
  const PlannedOp& planned = program_.plan.ops[op];
  if (!planned.native) return {.autocasts = true};
  const DTypeRule rule = declaration(planned.kind).dtype;
  if (rule == DTypeRule::Parameter) {
    return {.parameter = forward_.find(parameters_[op][0]), .autocasts = true};
  }
  return {.autocasts = rule == DTypeRule::Autocast};
}

void Compiler::compile_host_backward(const Step& step) {
  const Plan& plan = program_.plan;
  Program::HostBackward call{.step = backward_step_++, .name = step.name};
  call.gradients.push_back(gradient({Kind::Grad, step.last() + 1}));
  for (const int op : step.ops) {
    for (const std::string& name : plan.ops[op].extra_outputs) {
      call.gradients.push_back(gradient({Kind::ExtraOutputGrad, op, name}));
    }
  }
  for (const int op : step.ops) call.saved.push_back(saved_of(op));
  const int first = step.first();
  const bool wants_input =
      first == 0 ? gradients_.contains({Kind::Grad, 0}) : first > plan.first_backward;
  add_result({Kind::Grad, first}, wants_input, {.of = Of::Input, .op = first}, call);
  for (const int op : step.ops) {
    for (size_t k = 0; k < parameters_[op].size(); ++k) {
      const Value grad{Kind::ParameterGrad, op, parameters_[op][k].name};
      const bool accumulates = plan.result_of(grad).kind == Kind::State;
      program_.accumulates |= accumulates;
      add_result(
          grad, gradients_.contains(grad),
          {.of = Of::Parameter, .op = op, .k = static_cast<int>(k), .accumulates = accumulates},
          call);
    }
  }
  for (const int op : step.ops) {
    int k = 0;
    for (const auto& source : extra_inputs(op)) {
      add_extra_grad(source, {.of = Of::ExtraInput, .op = op, .k = k++}, call);
    }
  }
  program_.backward.lines.push_back({std::move(call)});
}

void Compiler::add_extra_grad(const std::optional<Value>& source,
                              Program::HostBackward::Result result, Program::HostBackward& call) {
  if (!source) {
    result.value = -1;
    call.results.push_back(result);
    return;
  }
  const Value grad = gradient_of(*source);
  const bool is_wanted = grad.kind == Kind::ExtraOutputGrad
                             ? grad.op >= program_.plan.first_backward
                             : gradients_.contains(grad);
  add_result(grad, is_wanted, result, call);
}

void Compiler::add_result(const Value& value, bool is_wanted, Program::HostBackward::Result result,
                          Program::HostBackward& call) {
  const Value tensor = tensor_of(value);
  result.value = -1;
  if (is_wanted) {
    const int previous = backward_.find(value);
    if (value.kind == Kind::ExtraOutputGrad && previous >= 0) {
      result.previous = previous;
      result.value = previous;
    } else {
      result.value = backward_.define(value);
    }
    result.metadata = metadata_of(tensor);
  }
  call.results.push_back(result);
}

Program::HostBackward::Saved Compiler::saved_of(int op) {
  if (program_.keeps_own[op]) return {.own_row = op};
  Program::HostBackward::Saved saved{.dtype = dtype_metadata(op)};
  for (const std::string& name : slots_of(op)) {
    const Value value{Kind::Slot, op, name};
    const bool is_there = backward_.find(value) >= 0 || sources_.contains(value);
    saved.slots.push_back(is_there ? load(value) : -1);
  }
  // The host reads these from its modules. Autograd saves them, so that a change is an error.
  const OpDeclaration& row = declaration(program_.plan.ops[op].kind);
  for (const Value& parameter : parameters_[op]) {
    const std::string name = row.parameter_of(parameter.name);
    if (row.backward_schema.has_argument(name) && !row.has_slot(name)) load(parameter);
  }
  return saved;
}

int Compiler::dtype_metadata(int op) {
  const auto step = std::ranges::lower_bound(program_.plan.forward, op, {}, &Step::last);
  if (step->python) return -1;
  const int first = step->first(), cast = metadata_of({Kind::Temporary, first, "input"});
  return cast >= 0 ? cast : metadata_of({Kind::Main, first});
}

}  // namespace transformer_ops
