#include "executor/compiler.h"

#include <algorithm>
#include <array>
#include <span>

#include "executor/call_text.h"
#include "executor/check_call.h"
#include "executor/passes.h"
#include "executor/weight_cache_key.h"
#include "fuser/error.h"
#include "op/dtype.h"
#include "op/torch_library.h"
#include "op/variant.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;
using Line = Program::Line;

}  // namespace

Compiler::Compiler(const Plan& plan) : gradients_(plan.gradients.begin(), plan.gradients.end()) {
  program_.plan = plan;
  program_.has_host_steps = plan.has_python_steps();
  parameters_.resize(plan.ops.size());
  for (const Value& value : plan.whole_parameters()) parameters_[value.op].push_back(value);
  for (const Value& value : plan.extra_inputs) feeds_[value] = value;
  for (const Route& route : plan.routes) feeds_[route.input] = route.output;
  for (const PlannedOp& op : plan.ops) program_.keeps_own.push_back(!op.native);
  program_.gives_integers = std::ranges::any_of(plan.extra_outputs, [&](const Value& output) {
    const PlannedOp& op = plan.ops[output.op];
    return op.native && declaration(op.kind).is_integer(output.name);
  });
  for (const Step& step : plan.forward) {
    if (!step.python || !step.joint) continue;
    for (const int op : step.ops) program_.keeps_own[op] = true;
  }
}

Program Compiler::run() {
  const Plan& plan = program_.plan;
  check_calls(plan);
  compile_forward();
  if (plan.needs_backward()) compile_backward();
  note_views(program_);
  for (const int output : program_.outputs) {
    TORCH_CHECK(output >= 0, "[plan] forward must write every output, got one that it does not");
  }
  metadata_.insert_into(program_);
  if (may_lack_gradients_) mark_skippable(program_.backward);
  program_.always_reads_metadata = std::ranges::any_of(program_.backward.lines, reads_metadata);
  std::vector<int> updated;
  for (const auto& [forward, backward] : program_.updated) updated.push_back(forward);
  mark_dead(program_.forward, {&program_.outputs, &program_.saved, &updated});
  mark_dead(program_.backward, {&program_.input_grads});
  note_results(program_);
  return std::move(program_);
}

std::vector<std::optional<Value>> Compiler::extra_inputs(int op) const {
  std::vector<std::optional<Value>> sources;
  for (const std::string& name : program_.plan.ops[op].extra_inputs) {
    const auto found = feeds_.find({Kind::ExtraInput, op, name});
    sources.push_back(found == feeds_.end() ? std::nullopt : std::optional(found->second));
  }
  return sources;
}

void Compiler::compile_forward() {
  const Plan& plan = program_.plan;
  program_.inputs.push_back(forward_.define({Kind::Main, 0}));
  for (const Value& value : plan.extra_inputs) program_.inputs.push_back(forward_.define(value));
  first_parameter_ = forward_.count();
  for (const Value& value : plan.parameters) program_.inputs.push_back(forward_.define(value));
  for (const Value& value : plan.states) program_.inputs.push_back(forward_.define(value));
  for (const Step& step : plan.forward) {
    const size_t first_line = program_.forward.lines.size();
    if (step.python) {
      compile_host_forward(step);
    } else {
      compile_step(step, forward_, program_.forward);
    }
    mark_lines(program_.forward, first_line, step);
  }
  program_.outputs.push_back(forward_.find({Kind::Main, plan.size()}));
  for (int i = 0; i <= plan.size(); ++i)
    program_.boundaries.push_back(forward_.find({Kind::Main, i}));
  for (const Value& value : plan.extra_outputs) {
    program_.outputs.push_back(forward_.find(value));
    const PlannedOp& op = plan.ops[value.op];
    if (value.op < first_live_op()) {
      ++program_.constants;
    } else if (op.native && declaration(op.kind).is_detached(value.name)) {
      program_.detached.push_back(program_.outputs.size() - 1);
    }
  }
  program_.forward.values = forward_.count();
}

void Compiler::mark_lines(Program::Code& code, size_t first_line, const Step& step) {
  for (size_t i = first_line; i < code.lines.size(); ++i) code.lines[i].op = step.first();
}

void Compiler::compile_backward() {
  const Plan& plan = program_.plan;
  program_.output_grads.push_back(backward_.define({Kind::Grad, plan.size()}));
  for (size_t i = 0; i < plan.extra_outputs.size(); ++i) {
    const Value& value = plan.extra_outputs[i];
    const int index = backward_.define({Kind::ExtraOutputGrad, value.op, value.name});
    if (i >= program_.constants) program_.output_grads.push_back(index);
  }
  may_lack_gradients_ = program_.has_host_steps || program_.output_grads.size() > 1;
  if (may_lack_gradients_) {
    // Passing a gradient through gives it the name of a boundary that forward may not have.
    given_gradients_[program_.output_grads[0]] = forward_.find({Kind::Main, plan.size()});
  }
  for (auto step = plan.backward.rbegin(); step != plan.backward.rend(); ++step) {
    if (step->skipped) continue;
    const size_t first_line = program_.backward.lines.size();
    compile_step(*step, backward_, program_.backward);
    if (step->python) compile_host_backward(*step);
    if (!step->python && program_.has_host_steps) fit_dtype({Kind::Grad, step->first()});
    mark_lines(program_.backward, first_line, *step);
  }
  program_.input_grads.push_back(plan.first_backward == 0 ? backward_.find({Kind::Grad, 0}) : -1);
  for (const Value& value : plan.extra_inputs) {
    program_.input_grads.push_back(backward_.find({Kind::ExtraInputGrad, value.op, value.name}));
  }
  for (const Value& value : plan.parameters) {
    const bool is_part = value.part != Value::Part::Whole;
    program_.input_grads.push_back(is_part ? -1 : backward_.find(gradient_of(value)));
  }
  program_.input_grads.resize(program_.inputs.size(), -1);
  program_.backward.values = backward_.count();
  note_delays();
}

void Compiler::note_delays() {
  const auto& parameters = program_.plan.parameters;
  const size_t first = program_.inputs.size() - program_.plan.states.size() - parameters.size();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Value state = program_.plan.result_of(gradient_of(parameters[i]));
    if (parameters[i].part != Value::Part::Whole || state.kind != Kind::State) continue;
    if (row_of(state).later) program_.delayed.push_back(static_cast<int>(first + i));
  }
}

int Compiler::first_live_op() const {
  for (const Step& step : program_.plan.backward) {
    if (!step.skipped) return program_.plan.needs_backward() ? step.first() : 0;
  }
  return 0;
}

void Compiler::compile_step(const Step& step, Numbering& values, Program::Code& code) {
  for (const Instruction& instruction : step.instructions) {
    if (instruction.target == kCast) {
      compile_cast(step.name, instruction, values, code);
    } else {
      compile_instruction(instruction, values, code);
    }
  }
  if (&values == &forward_) note_saves(step, values);
}

void Compiler::compile_cast(const std::string& step, const Instruction& instruction,
                            Numbering& values, Program::Code& code) {
  const auto& dtype = std::get<Attribute>(instruction.arguments[1]);
  const int from = std::get<Program::Load>(operand(instruction.arguments[0], values)).value;
  const int to = values.define(std::get<Value>(instruction.results[0]));
  const auto torch_dtype = to_torch(parse_dtype(std::get<std::string>(dtype)));
  code.lines.push_back({Program::Cast{step, torch_dtype, from, to}, {}});
}

void Compiler::compile_instruction(const Instruction& instruction, Numbering& values,
                                   Program::Code& code) {
  if (instruction.target.empty()) return hand_over(instruction, values, code);
  const Callee callee = find_op(instruction.target);
  Program::Call call{
      callee.op, callee.schema, find_typed_op(instruction.target), instruction.target, {}, {}};
  const bool backward = &values == &backward_;
  if (backward) {
    call.backward_of = backward_of(instruction.target);
    for_each_value(instruction.arguments, [&](const Value& value) {
      if (!is_gradient(value)) return;
      // If no backward step reads an extra output, its gradient may be missing.
      if (values.find(value) < 0 && program_.has_host_steps) values.define(value);
      call.gradients.push_back(gradient(value));
    });
  }
  for (size_t i = 0; i < instruction.arguments.size(); ++i) {
    const Argument& argument = instruction.arguments[i];
    const bool is_list = callee.schema->arguments()[i].type()->kind() == c10::TypeKind::ListType;
    if (is_list && std::holds_alternative<None>(argument)) {
      call.operands.emplace_back(Program::LoadList());
    } else {
      call.operands.push_back(operand(argument, values));
    }
  }
  if (callee.by_text) call.text = call_text(call);
  note_counts(instruction, call);
  if (call.typed && call.typed->random) program_.random = true;
  if (call.typed && call.typed->is_shared) {
    call.weight_cache_key = weight_cache_key(program_.plan, instruction, call,
                                             [&](const Value& value) { return origin(value); });
  }
  std::vector<Line> sums;
  for_each_value(instruction.results, [&](const Value& value) {
    const int previous = values.find(value);
    if (is_given(value)) {
      call.results.push_back(values.fresh());
      call.result_ops.push_back(value.op);
      sums.push_back({record(instruction, value, call.results.back(), values), {}});
      return;
    }
    // If a channel has several readers, their gradients are added.
    if (value.kind == Kind::ExtraOutputGrad && previous >= 0) {
      call.results.push_back(values.fresh());
      sums.push_back({Program::Copy{call.results.back(), previous}, {}});
    } else {
      call.results.push_back(values.define(value));
    }
    call.result_ops.push_back(value.op);
  });
  if (backward) note_accumulation(instruction, call);
  code.lines.push_back({std::move(call), {}});
  for (Line& sum : sums) code.lines.push_back(std::move(sum));
}

const OpDeclaration* Compiler::backward_of(const std::string& target) {
  const Variant* const variant = find_variant(target);
  return variant == nullptr ? nullptr : find_declaration_of_backward(variant->base);
}

Value Compiler::origin(const Value& value) const {
  const auto source = value.kind == Kind::Slot ? sources_.find(value) : sources_.end();
  if (source == sources_.end()) return value;
  const auto& parameters = program_.plan.parameters;
  const int place = source->second - first_parameter_;
  return place >= 0 && place < std::ssize(parameters) ? parameters[place] : value;
}

void Compiler::note_counts(const Instruction& instruction, Program::Call& call) {
  const auto is_list = [](const Result& each) { return std::holds_alternative<ValueList>(each); };
  if (std::ranges::none_of(instruction.results, is_list)) return;
  for (const Result& result : instruction.results) {
    const auto* const list = std::get_if<ValueList>(&result);
    call.counts.push_back(list == nullptr ? -1 : static_cast<int>(list->size()));
  }
}

bool Compiler::is_given(const Value& value) const { return has_value(program_.plan.states, value); }

Program::Record Compiler::record(const Instruction& instruction, const Value& state, int found,
                                 Numbering& values) {
  const auto is_state = [](const Argument& argument) {
    const auto* const value = std::get_if<Value>(&argument);
    return value != nullptr && value->kind == Kind::State;
  };
  const std::span arguments(instruction.arguments);
  const auto scale = std::ranges::find_if(arguments, is_state);
  const bool has_place = arguments.end() - scale > 1;
  const auto* const place = has_place ? std::get_if<Attribute>(&scale[1]) : nullptr;
  const auto* const number = place == nullptr ? nullptr : std::get_if<int64_t>(place);
  TORCH_CHECK(number != nullptr, "[plan] a call that updates ", to_text(state),
              " must take a scale and its position, got '", instruction.target, "'");
  int index = values.find(state);
  if (index < 0) {
    index = values.define(state);
    program_.updated.emplace_back(forward_.find(state), index);
  }
  return {found, index, *number};
}

void Compiler::hand_over(const Instruction& instruction, Numbering& values, Program::Code& code) {
  const auto* source = std::get_if<Value>(&instruction.arguments[0]);
  TORCH_CHECK(source != nullptr, "[plan] a hand-over must name a value");
  const int from = values.find(*source);
  check_written(*source, from);
  for_each_value(instruction.results, [&](const Value& result) {
    const int previous = values.find(result);
    if (result.kind == Kind::ExtraOutputGrad && previous >= 0) {
      code.lines.push_back({Program::Copy{from, previous}, {}});
    } else if (result.kind == Kind::ExtraOutputGrad) {
      // This is a value of its own, because later gradients are added to it.
      code.lines.push_back({Program::Copy{from, values.define(result)}, {}});
    } else {
      values.alias(result, from);
    }
  });
}

void Compiler::check_written(const Value& value, int index) {
  TORCH_CHECK(index >= 0, "[plan] value must be written before it is read, got ", to_text(value));
}

Program::Operand Compiler::operand(const Argument& argument, Numbering& values) {
  if (std::holds_alternative<None>(argument)) return Program::Constant{c10::IValue()};
  if (const auto* constant = std::get_if<Attribute>(&argument)) {
    return Program::Constant{to_ivalue(*constant)};
  }
  if (const auto* list = std::get_if<ValueList>(&argument)) {
    Program::LoadList loads;
    for (const Value& value : *list) {
      loads.push_back(std::get<Program::Load>(operand(value, values)));
    }
    return loads;
  }
  const Value& value = std::get<Value>(argument);
  if (value.kind == Kind::Shape) {
    const int metadata = metadata_of({Kind::Main, value.op});
    TORCH_CHECK(metadata >= 0, "[plan] shape must be of a value that forward writes, got ",
                to_text(value));
    return Program::ShapeOf{metadata};
  }
  const bool from_forward =
      value.kind == Kind::Slot || value.kind == Kind::Parameter || value.kind == Kind::State;
  if (&values == &backward_ && from_forward) return Program::Load{load(value)};
  const int index = values.find(value);
  check_written(value, index);
  return Program::Load{index};
}

void Compiler::note_saves(const Step& step, Numbering& values) {
  for (const Save& save : step.saves) {
    sources_[save.slot] = values.find(save.source);
  }
}

int Compiler::load(const Value& value) {
  if (const int known = backward_.find(value); known >= 0) return known;
  const auto slot = sources_.find(value);
  const int source = slot == sources_.end() ? forward_.find(value) : slot->second;
  TORCH_CHECK(source >= 0, "[plan] slot must be saved by forward, got ", to_text(value));
  const int index = backward_.define(value);
  for (size_t i = 0; i < program_.saved.size(); ++i) {
    if (program_.saved[i] != source) continue;
    program_.more_loads.emplace_back(static_cast<int>(i), index);
    program_.saved_slots[value] = static_cast<int>(i);
    return index;
  }
  program_.saved_slots[value] = static_cast<int>(program_.saved.size());
  program_.saved.push_back(source);
  program_.loads.push_back(index);
  return index;
}

bool Compiler::is_gradient(const Value& value) {
  return value.kind == Kind::Grad || value.kind == Kind::ExtraOutputGrad;
}

Program::Gradient Compiler::gradient(const Value& value) {
  const int op = value.kind == Kind::Grad ? value.op - 1 : value.op;
  const int index = backward_.find(value);
  if (!may_lack_gradients_) return {index, op};
  const auto given = given_gradients_.find(index);
  return {index, op,
          given == given_gradients_.end() ? metadata_of(tensor_of(value))
                                          : metadata_.request(given->second)};
}

int Compiler::metadata_of(const Value& value) {
  const int index = forward_.find(value);
  return index < 0 ? -1 : metadata_.request(index);
}

const State& Compiler::row_of(const Value& state) const {
  const auto& states = declaration(program_.plan.ops[state.op].kind).states;
  return *std::ranges::find_if(states, [&](const State& row) { return row.has_value(state.name); });
}

void Compiler::note_accumulation(const Instruction& instruction, Program::Call& call) {
  size_t first = 0;
  for (size_t i = 0; i < instruction.results.size(); ++i) {
    const std::array<Result, 1> result = {instruction.results[i]};
    std::vector<bool> wanted;
    const State* state = nullptr;
    int op = -1;
    for_each_value(result, [&](const Value& value) {
      wanted.push_back(value.kind == Kind::State && !is_given(value));
      if (!wanted.back()) return;
      state = &row_of(value);
      op = value.op;
      // Autograd gets this gradient instead of the state.
      const std::string number = value.name.substr(state->name.size());
      backward_.alias({Kind::ParameterGrad, op, state->parameter + number},
                      call.results[first + wanted.size() - 1]);
    });
    if (state != nullptr) {
      const auto into =
          c10::Dispatcher::singleton().findSchema({torch_name(instruction.target) + "_into", ""});
      call.accumulates = {static_cast<int>(i), first, wanted, op, into, state->later};
      program_.accumulates = true;
    }
    first += wanted.size();
  }
}

void Compiler::fit_dtype(const Value& gradient) {
  const int value = backward_.find(gradient), metadata = metadata_of(tensor_of(gradient));
  if (value >= 0 && metadata >= 0)
    program_.backward.lines.push_back({Program::FitDtype{value, metadata}});
}

Program compile(const Plan& plan) { return Compiler(plan).run(); }

}  // namespace transformer_ops
