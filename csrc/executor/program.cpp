#include "executor/program.h"

#include <ATen/core/List.h>

#include <algorithm>
#include <atomic>

#include "executor/check_call.h"
#include "fuser/error.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;
using Line = Program::Line;

// Numbers the values of one direction. A hand-over only gives a value a second name.
class Numbering {
 public:
  int fresh() { return count_++; }
  int define(const Value& value) { return names_[value] = fresh(); }
  void alias(const Value& value, int index) { names_[value] = index; }
  int find(const Value& value) const {
    const auto row = names_.find(value);
    return row == names_.end() ? -1 : row->second;
  }
  int count() const { return count_; }

 private:
  std::map<Value, int> names_;
  int count_ = 0;
};

c10::OperatorHandle find_op(const std::string& name) {
  const std::string full = name.find("::") == std::string::npos ? "transformer_ops::" + name : name;
  const auto handle = c10::Dispatcher::singleton().findSchema({full, ""});
  TORCH_CHECK(handle.has_value(), "[plan] op must be registered, got '", full, "'");
  return *handle;
}

class Compiler {
 public:
  explicit Compiler(const Plan& plan) {
    static std::atomic<uint64_t> next_id = 0;
    program_.plan = plan;
    program_.id = next_id++;
  }

  Program run() {
    const Plan& plan = program_.plan;
    TORCH_CHECK(!plan.has_python_steps(),
                "[plan] steps must be native to run without Python, got a Python step");
    check_calls(plan);
    compile_forward();
    if (plan.needs_backward()) compile_backward();
    program_.only_views = has_only_views();
    for (const int output : program_.outputs) {
      TORCH_CHECK(output >= 0, "[plan] forward must write every output, got one that it does not");
    }
    mark_dead(program_.forward, {&program_.outputs, &program_.saved, &program_.shapes});
    mark_dead(program_.backward, {&program_.input_grads});
    return std::move(program_);
  }

 private:
  void compile_forward() {
    const Plan& plan = program_.plan;
    program_.inputs.push_back(forward_.define({Kind::Main, 0}));
    for (const Value& value : plan.extra_inputs) program_.inputs.push_back(forward_.define(value));
    for (const Value& value : plan.parameters) program_.inputs.push_back(forward_.define(value));
    for (const Step& step : plan.forward)
      compile_step(step, forward_, program_.forward, Kind::Main);
    program_.outputs.push_back(forward_.find({Kind::Main, plan.size()}));
    for (const Value& value : plan.extra_outputs) {
      program_.outputs.push_back(forward_.find(value));
      if (value.op < first_live_op()) ++program_.constants;
    }
    program_.forward.values = forward_.count();
  }

  void compile_backward() {
    const Plan& plan = program_.plan;
    program_.output_grads.push_back(backward_.define({Kind::Grad, plan.size()}));
    for (size_t i = 0; i < plan.extra_outputs.size(); ++i) {
      const Value& value = plan.extra_outputs[i];
      const int index = backward_.define({Kind::ExtraOutputGrad, value.op, value.name});
      if (i >= program_.constants) program_.output_grads.push_back(index);
    }
    for (auto step = plan.backward.rbegin(); step != plan.backward.rend(); ++step) {
      if (!step->skipped) compile_step(*step, backward_, program_.backward, Kind::Grad);
    }
    program_.input_grads.push_back(plan.first_backward == 0 ? backward_.find({Kind::Grad, 0}) : -1);
    for (const Value& value : plan.extra_inputs) {
      program_.input_grads.push_back(backward_.find({Kind::ExtraInputGrad, value.op, value.name}));
    }
    for (const Value& value : plan.parameters) {
      program_.input_grads.push_back(backward_.find({Kind::ParameterGrad, value.op, value.name}));
    }
    program_.backward.values = backward_.count();
    note_views();
  }

  // Ops of torch's own may give a view of what they are given.
  void note_views() {
    std::vector<bool> views(program_.backward.values, false);
    for (const Line& line : program_.backward.lines) {
      const auto* call = std::get_if<Program::Call>(&line.what);
      if (call == nullptr || call->typed != nullptr) continue;
      for (const int result : call->results) views[result] = true;
    }
    for (const int index : program_.input_grads) {
      program_.views.push_back(index >= 0 && views[index]);
    }
  }

  // The first op that a step of backward covers.
  int first_live_op() const {
    for (const Step& step : program_.plan.backward) {
      if (!step.skipped) return program_.plan.needs_backward() ? step.first() : 0;
    }
    return 0;
  }

  bool has_only_views() const {
    if (program_.outputs.size() != 1) return false;
    return std::ranges::all_of(program_.forward.lines, [](const Line& line) {
      const auto* call = std::get_if<Program::Call>(&line.what);
      return call != nullptr && call->name == "aten::reshape";
    });
  }

  void compile_step(const Step& step, Numbering& values, Program::Code& code, Kind main) {
    const bool forward = main == Kind::Main;
    const Value in{main, forward ? step.first() : step.last() + 1};
    const Value out{main, forward ? step.last() + 1 : step.first()};
    if (step.compute && forward) add_cast(step.name, in, *step.compute, values, code);
    std::map<Value, int> originals;
    if (step.compute && step.cast_parameters) originals = cast_parameters(step, values, code);
    for (const Instruction& instruction : step.instructions) {
      compile_instruction(instruction, values, code);
    }
    for (const auto& [parameter, index] : originals) values.alias(parameter, index);
    if (step.result) add_cast(step.name, out, *step.result, values, code);
    if (forward) note_saves(step, values);
  }

  void add_cast(const std::string& step, const Value& value, DType dtype, Numbering& values,
                Program::Code& code) {
    const int from = values.find(value);
    if (from < 0) return;
    const int to = values.define(value);
    code.lines.push_back({Program::Cast{step, to_torch(dtype), from, to}, {}});
  }

  // Returns the uncast parameters, which are what is saved.
  std::map<Value, int> cast_parameters(const Step& step, Numbering& values, Program::Code& code) {
    std::map<Value, int> originals;
    for (const Value& parameter : program_.plan.parameters) {
      if (parameter.op < step.first() || parameter.op > step.last()) continue;
      const Value slot{Kind::Slot, parameter.op, parameter.name};
      const bool backward = &values == &backward_;
      for (const Value& value : {parameter, slot}) {
        if (backward ? !is_read(step, value) : value.kind == Kind::Slot) continue;
        originals[value] = backward ? load(value) : values.find(value);
        add_cast(step.name, value, *step.compute, values, code);
      }
    }
    return originals;
  }

  static bool is_read(const Step& step, const Value& value) {
    for (const Instruction& instruction : step.instructions) {
      for (const Argument& argument : instruction.arguments) {
        const auto* read = std::get_if<Value>(&argument);
        if (read && *read == value) return true;
      }
    }
    return false;
  }

  void compile_instruction(const Instruction& instruction, Numbering& values, Program::Code& code) {
    if (instruction.target.empty()) return hand_over(instruction, values, code);
    Program::Call call{
        find_op(instruction.target), find_typed_op(instruction.target), instruction.target, {}, {}};
    for (const Argument& argument : instruction.arguments) {
      call.operands.push_back(operand(argument, values));
      const auto* value = std::get_if<Value>(&argument);
      if (value == nullptr) continue;
      const int index = values.find(*value);
      if (value->kind == Kind::Grad) call.gradients.push_back({index, value->op - 1});
      if (value->kind == Kind::ExtraOutputGrad) call.gradients.push_back({index, value->op});
    }
    if (call.typed && call.typed->random) program_.random = true;
    std::vector<Line> sums;
    for (const Value& value : instruction.results) {
      const int previous = values.find(value);
      // Several consumers of one channel: their gradients add up.
      if (value.kind == Kind::ExtraOutputGrad && previous >= 0) {
        call.results.push_back(values.fresh());
        sums.push_back({Program::Copy{call.results.back(), previous}, {}});
      } else {
        call.results.push_back(values.define(value));
      }
      call.result_ops.push_back(value.op);
    }
    code.lines.push_back({std::move(call), {}});
    for (Line& sum : sums) code.lines.push_back(std::move(sum));
  }

  void hand_over(const Instruction& instruction, Numbering& values, Program::Code& code) {
    const auto* source = std::get_if<Value>(&instruction.arguments[0]);
    TORCH_CHECK(source != nullptr, "[plan] a hand-over must name a value");
    const int from = values.find(*source);
    check_written(*source, from);
    for (const Value& result : instruction.results) {
      const int previous = values.find(result);
      if (result.kind == Kind::ExtraOutputGrad && previous >= 0) {
        code.lines.push_back({Program::Copy{from, previous}, {}});
      } else if (result.kind == Kind::ExtraOutputGrad) {
        // A value of its own: later gradients are added to it.
        code.lines.push_back({Program::Copy{from, values.define(result)}, {}});
      } else {
        values.alias(result, from);
      }
    }
  }

  static void check_written(const Value& value, int index) {
    TORCH_CHECK(index >= 0, "[plan] value must be written before it is read, got ", to_text(value));
  }

  Program::Operand operand(const Argument& argument, Numbering& values) {
    if (std::holds_alternative<None>(argument)) return Program::Constant{c10::IValue()};
    if (const auto* constant = std::get_if<Attribute>(&argument)) {
      return Program::Constant{to_ivalue(*constant)};
    }
    const Value& value = std::get<Value>(argument);
    if (value.kind == Kind::Shape) {
      const int index = forward_.find({Kind::Main, value.op});
      TORCH_CHECK(index >= 0, "[plan] shape must be of a value that forward writes, got ",
                  to_text(value));
      program_.shapes.push_back(index);
      return Program::ShapeOf{static_cast<int>(program_.shapes.size()) - 1};
    }
    const bool from_forward = value.kind == Kind::Slot || value.kind == Kind::Parameter;
    if (&values == &backward_ && from_forward) return Program::Load{load(value)};
    const int index = values.find(value);
    check_written(value, index);
    return Program::Load{index};
  }

  void note_saves(const Step& step, Numbering& values) {
    for (const Save& save : step.saves) {
      sources_[save.slot] = values.find(save.source);
    }
  }

  // The backward value of a slot or parameter; the first use saves it in forward.
  int load(const Value& value) {
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

  static void mark_dead(Program::Code& code, std::initializer_list<const std::vector<int>*> kept) {
    std::vector<bool> seen(code.values, false);
    for (const auto* list : kept) {
      for (const int value : *list) {
        if (value >= 0) seen[value] = true;
      }
    }
    for (auto line = code.lines.rbegin(); line != code.lines.rend(); ++line) {
      const auto visit = [&](int value) {
        if (!seen[value]) line->dead.push_back(value);
        seen[value] = true;
      };
      if (auto* call = std::get_if<Program::Call>(&line->what)) {
        std::map<int, int> reads;
        for (const auto& operand : call->operands) {
          if (const auto* load = std::get_if<Program::Load>(&operand)) ++reads[load->value];
        }
        for (auto& operand : call->operands) {
          auto* load = std::get_if<Program::Load>(&operand);
          if (load) load->last = !seen[load->value] && reads[load->value] == 1;
        }
        for (const auto& [value, count] : reads) visit(value);
        for (const int result : call->results) visit(result);
      } else if (const auto* cast = std::get_if<Program::Cast>(&line->what)) {
        visit(cast->from);
        visit(cast->to);
      } else {
        const auto& copy = std::get<Program::Copy>(line->what);
        visit(copy.from);
        visit(copy.to);
      }
    }
  }

  Program program_;
  Numbering forward_;
  Numbering backward_;
  std::map<Value, int> sources_;  // slot -> forward value
};

}  // namespace

void check_calls(const Plan& plan) {
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const Step& step : *steps) {
      for (const Instruction& instruction : step.instructions) {
        if (!instruction.target.empty()) check_call(instruction, find_op(instruction.target));
      }
    }
  }
}

Program compile(const Plan& plan) { return Compiler(plan).run(); }

at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::Float16:
      return at::kHalf;
    case DType::BFloat16:
      return at::kBFloat16;
    case DType::Float32:
      return at::kFloat;
    case DType::Float64:
      return at::kDouble;
    default:
      TORCH_CHECK(false, "[plan] dtype must be known, got ", to_text(dtype));
  }
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    default:
      return DType::Unknown;
  }
}

c10::IValue to_ivalue(const Attribute& attribute) {
  struct Converter {
    c10::IValue operator()(bool value) const { return value; }
    c10::IValue operator()(int64_t value) const { return value; }
    c10::IValue operator()(double value) const { return value; }
    c10::IValue operator()(const std::string& value) const { return value; }
    c10::IValue operator()(const std::vector<int64_t>& value) const { return value; }
    c10::IValue operator()(const std::vector<bool>& value) const { return value; }
  };
  return std::visit(Converter{}, attribute);
}

}  // namespace transformer_ops
