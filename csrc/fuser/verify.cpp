// The planner's postcondition, which parsed plan texts are checked against, too.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/op_node.h"
#include "fuser/plan.h"
#include "fuser/quantize.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// The names that a value of this kind may have; none if any name is allowed.
std::optional<std::vector<std::string>> names_for(const Value& value, const PlannedOp& op) {
  switch (value.kind) {
    case Kind::ExtraInput:
    case Kind::ExtraInputGrad:
      return op.extra_inputs;
    case Kind::ExtraOutput:
    case Kind::ExtraOutputGrad:
      return op.extra_outputs;
    case Kind::Parameter:
    case Kind::ParameterGrad: {
      if (!op.native) return std::nullopt;
      // Only the list that the name may belong to is expanded, because lists are long.
      const OpDeclaration& row = declaration(op.kind);
      return row.tensors_of(row.parameter_of(value.name), op.attributes);
    }
    default:
      return std::nullopt;
  }
}

std::string place_of(const Plan& plan, int op) {
  return "[plan] op " + std::to_string(op) + " (" + plan.ops[op].kind + ")";
}

// Does the op have a state of that name: one of the plan's, or one that takes a gradient?
bool has_state(const Plan& plan, const Value& state) {
  const PlannedOp& op = plan.ops[state.op];
  if (has_value(plan.states, state)) return true;
  if (!op.native) return false;
  const auto names = declaration(op.kind).parameter_tensors(op.attributes);
  return std::ranges::any_of(names, [&](const auto& name) {
    return plan.result_of({Kind::ParameterGrad, state.op, name}) == state;
  });
}

void verify_value(const Value& value, const Plan& plan) {
  const int count = plan.size() + (is_boundary(value.kind) ? 1 : 0);
  check(value.op >= 0 && value.op < count, "[plan] a value must name an op of the plan, got ",
        to_text(value), " with ", plan.size(), " ops");
  check(
      value.part == Value::Part::Whole || value.kind == Kind::Slot || value.kind == Kind::Parameter,
      "[plan] a part must be one of a slot or a parameter, got ", to_text(value));
  if (value.op == plan.size()) return;
  check(value.kind != Kind::State || has_state(plan, value), place_of(plan, value.op),
        " must update the state that is named, got ", to_text(value));
  const auto names = names_for(value, plan.ops[value.op]);
  check(!names || position_of(*names, value.name) >= 0, place_of(plan, value.op),
        " must have the tensor that is named, got ", to_text(value));
}

void verify_cast(const Step& step, const Instruction& cast) {
  const auto& arguments = cast.arguments;
  const auto* dtype = arguments.size() == 2 ? std::get_if<Attribute>(&arguments[1]) : nullptr;
  const auto* text = dtype != nullptr ? std::get_if<std::string>(dtype) : nullptr;
  const auto* from = text != nullptr ? std::get_if<Value>(&arguments[0]) : nullptr;
  const bool fits = from != nullptr && from->kind != Kind::Shape && cast.results.size() == 1 &&
                    std::holds_alternative<Value>(cast.results[0]) &&
                    parse_dtype(*text) != DType::Unknown;
  check(fits, "[plan] step '", step.name, "' must cast one tensor to one dtype, got a cast of ",
        arguments.size(), " arguments to ", cast.results.size(), " results");
}

// A list has all tensors of a parameter, in order, or one tensor.
void verify_list(const Step& step, const ValueList& list, const Plan& plan) {
  for (const Value& value : list) {
    const bool is_held = value.kind == Kind::Parameter || value.kind == Kind::Slot ||
                         value.kind == Kind::ParameterGrad;
    if (!is_held || value.op < 0 || value.op >= plan.size() || !plan.ops[value.op].native) continue;
    const OpDeclaration& row = declaration(plan.ops[value.op].kind);
    const std::string parameter = row.parameter_of(value.name);
    if (row.list_of(parameter) == nullptr) continue;
    ValueList all;
    for (const std::string& name : row.tensors_of(parameter, plan.ops[value.op].attributes)) {
      all.push_back({value.kind, value.op, name, value.part});
    }
    // Tensors may be cast or decoded under the same names, and gradients may be unwanted.
    const auto is_same = [&](const Value& a, const Value& b) {
      const bool is_unused = value.kind == Kind::ParameterGrad && a.kind == Kind::Temporary;
      return is_unused || (a.op == b.op && a.name == b.name);
    };
    check(std::ranges::equal(list, all, is_same), place_of(plan, value.op),
          " must have a list of all ", all.size(), " tensors of '", parameter, "' in step '",
          step.name, "', got ", to_text(list));
    return;
  }
}

void verify_values(const std::vector<Step>& steps, const Plan& plan) {
  for (const Step& step : steps) {
    for (const Instruction& instruction : step.instructions) {
      if (instruction.target == kCast) verify_cast(step, instruction);
      for (const Argument& argument : instruction.arguments) {
        if (const auto* list = std::get_if<ValueList>(&argument)) verify_list(step, *list, plan);
      }
      for (const Result& result : instruction.results) {
        if (const auto* list = std::get_if<ValueList>(&result)) verify_list(step, *list, plan);
      }
      const auto verify_one = [&](const Value& value) { verify_value(value, plan); };
      for_each_value(instruction.arguments, verify_one);
      for_each_value(instruction.results, verify_one);
    }
  }
}

void verify_routes(const Plan& plan) {
  for (const auto& [input, output] : plan.routes) {
    verify_value(input, plan);
    verify_value(output, plan);
    check(
        input.kind == Kind::ExtraInput && output.kind == Kind::ExtraOutput && output.op < input.op,
        "[plan] a route must lead from an extra output to an extra input of a later op, got ",
        to_text(input), "=", to_text(output));
  }
}

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// The names of the values of op i.
std::vector<std::string> names_of(const std::vector<Value>& values, int i) {
  std::vector<std::string> names;
  for (const Value& value : values_of(values, i)) {
    if (value.part == Value::Part::Whole) names.push_back(value.name);
  }
  return names;
}

bool fits(const Attribute& attribute, const std::string& type) {
  if (type.ends_with('?')) return fits(attribute, type.substr(0, type.size() - 1));
  if (type == "bool") return std::holds_alternative<bool>(attribute);
  if (type == "float") return std::holds_alternative<double>(attribute);
  if (type == "str") return std::holds_alternative<std::string>(attribute);
  if (type == "int" || type == "SymInt") return std::holds_alternative<int64_t>(attribute);
  if (type == "float[]") return std::holds_alternative<std::vector<double>>(attribute);
  if (type != "int[]" && type != "SymInt[]") return true;
  return std::holds_alternative<std::vector<int64_t>>(attribute);
}

// If a schema of the op has the attribute, the type must be the one in the schema.
void verify_attribute(const std::string& place, const OpDeclaration& row, const std::string& name,
                      const Attribute& attribute) {
  for (const Schema* schema : {&row.forward_schema, &row.backward_schema}) {
    for (const Schema::Field& field : schema->arguments) {
      check(field.name != name || fits(attribute, field.type), place, " must have attribute '",
            name, "' of type ", field.type, ", got ", to_text(attribute));
    }
  }
}

// All declared names must be there in order, except for optional ones.
void verify_names(const std::string& place, const char* what, const OpDeclaration& row,
                  const std::vector<std::string>& declared, const std::vector<std::string>& names) {
  auto next = names.begin();
  for (const std::string& name : declared) {
    if (next != names.end() && *next == name) {
      ++next;
    } else {
      check(row.is_optional(name), place, " must have ", what, " ", join_names(declared), ", got ",
            join_names(names));
    }
  }
  check(next == names.end(), place, " must have ", what, " ", join_names(declared), ", got ",
        join_names(names));
}

// A native op has exactly the attributes and tensors that its kind declares. `routed`: the extra
// inputs that read other ops.
void verify_native_op(const Plan& plan, int i, const std::vector<std::string>& routed) {
  const PlannedOp& op = plan.ops[i];
  const OpDeclaration& row = declaration(op.kind);
  const std::string place = place_of(plan, i);
  for (const auto& name : row.attributes) {
    const auto found = op.attributes.find(name);
    if (found == op.attributes.end()) {
      check(row.is_optional(name), place, " must have attribute '", name, "', got none");
    } else {
      verify_attribute(place, row, name, found->second);
    }
  }
  for (const auto& name : row.flags) {
    const auto flag = op.attributes.find(name);
    check(flag == op.attributes.end() || fits(flag->second, "bool"), place,
          " must have attribute '", name, "' of type bool, got ",
          flag == op.attributes.end() ? "" : to_text(flag->second));
  }
  verify_names(place, "parameters", row, row.parameter_tensors(op.attributes),
               names_of(plan.parameters, i));
  std::vector<std::string> names = names_of(plan.extra_inputs, i);
  names.insert(names.end(), routed.begin(), routed.end());
  std::ranges::sort(names, {}, [&](auto& name) { return position_of(row.extra_inputs, name); });
  verify_names(place, "extra inputs", row, row.extra_inputs, names);
}

// A quantized parameter is followed by its codes and its scale.
void verify_parts(const std::vector<Value>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto place = static_cast<size_t>(parameters[i].part);
    Value whole = parameters[i];
    whole.part = Value::Part::Whole;
    const bool fits =
        place <= i && parameters[i - place] == whole &&
        (place != 1 || (i + 1 < parameters.size() && parameters[i + 1].part == Value::Part::Scale));
    check(fits, "[plan] codes and scale must stand behind their parameter, got ",
          to_text(parameters[i]));
  }
}

void verify_ops(const Plan& plan) {
  verify_routes(plan);
  const std::pair<const std::vector<Value>*, Kind> lists[] = {
      {&plan.parameters, Kind::Parameter},
      {&plan.states, Kind::State},
      {&plan.extra_inputs, Kind::ExtraInput},
      {&plan.extra_outputs, Kind::ExtraOutput},
  };
  for (const auto& [values, kind] : lists) {
    check(std::ranges::is_sorted(*values, {}, &Value::op), "[plan] inputs, parameters, states and ",
          "outputs must be in the order of their ops");
  }
  for (const auto& [values, kind] : lists) {
    for (const Value& value : *values) {
      verify_value(value, plan);
      check(value.kind == kind, "[plan] inputs, parameters, states and outputs must be listed ",
            "as e1.0, p1.weight, st1.fp8_scale and o1.0, got ", to_text(value));
    }
  }
  verify_parts(plan.parameters);
  for (const Value& state : plan.states) {
    check(std::ranges::find(kScaleStates, state.name) != std::end(kScaleStates),
          place_of(plan, state.op), " must have a state of that name, got ", to_text(state));
  }
  std::vector<std::vector<std::string>> routed(plan.ops.size());
  for (const Route& route : plan.routes) routed[route.input.op].push_back(route.input.name);
  for (int i = 0; i < plan.size(); ++i) {
    if (plan.ops[i].native) verify_native_op(plan, i, routed[i]);
  }
  verify_values(plan.forward, plan);
  verify_values(plan.backward, plan);
}

void verify_coverage(const std::vector<Step>& steps, int ops, const char* direction) {
  int next = 0;
  for (const Step& step : steps) {
    check(!step.ops.empty(), "[plan] ", direction, " step '", step.name, "' must cover an op");
    for (const int op : step.ops) {
      check(op == next, "[plan] ", direction, " steps must cover op ", next, " next, got op ", op,
            " in step '", step.name, "'");
      ++next;
    }
  }
  check(next == ops, "[plan] ", direction, " steps must cover all ", ops, " ops, got ", next);
}

// Walks instructions in the order they run and checks that nothing is read before it is written.
class DataFlow {
 public:
  explicit DataFlow(std::set<Value> known) : known_(std::move(known)) {}

  void add(const Value& value) { known_.insert(value); }
  bool has(const Value& value) const { return known_.contains(value); }

  void run(const Step& step) {
    for (const Instruction& instruction : step.instructions) run(instruction, step);
  }

  void run(const Instruction& instruction, const Step& step) {
    for_each_value(instruction.arguments, [&](const Value& value) { require(value, step); });
    for_each_value(instruction.results, [&](const Value& result) { add(result); });
  }

  void require(const Value& value, const Step& step) const {
    check(has(value), "[plan] step '", step.name, "' must read what was written before, got ",
          to_text(value));
  }

 private:
  std::set<Value> known_;
};

void add_python_results(const Step& step, const Plan& plan, bool forward, DataFlow& flow) {
  const Kind main = forward ? Kind::Main : Kind::Grad;
  flow.add({main, forward ? step.last() + 1 : step.first()});
  if (!forward) return;
  for (const int op : step.ops) {
    for (const Value& output : values_of(plan.extra_outputs, op)) flow.add(output);
    for (const Route& route : plan.routes) {
      if (route.output.op == op) flow.add(route.output);
    }
  }
}

bool covers(const Step& step, int op) { return step.first() <= op && op <= step.last(); }

bool inside_python_step(const Plan& plan, int op) {
  return std::ranges::any_of(plan.forward,
                             [&](const Step& step) { return step.python && covers(step, op); });
}

// Both lists cover the ops in order.
void verify_joint_pairs(const std::vector<Step>& steps, const std::vector<Step>& others) {
  for (const Step& step : steps) {
    if (!step.joint) continue;
    const auto other = std::ranges::lower_bound(others, step.first(), {}, &Step::first);
    const bool paired =
        other != others.end() && other->joint && other->name == step.name && other->ops == step.ops;
    check(paired, "[plan] joint step '", step.name, "' must be in both passes; ",
          "another fusion took its ops in one of them");
  }
}

DataFlow verify_forward(const Plan& plan) {
  DataFlow flow({{Kind::Main, 0}});
  for (const Value& value : plan.parameters) flow.add(value);
  for (const Value& value : plan.states) flow.add(value);
  for (const Value& value : plan.extra_inputs) flow.add(value);
  for (const Step& step : plan.forward) {
    flow.require({Kind::Main, step.first()}, step);
    flow.run(step);
    if (step.python) add_python_results(step, plan, /*forward=*/true, flow);
    for (const Save& save : step.saves) {
      check(save.slot.kind == Kind::Slot, "[plan] step '", step.name, "' must save slots, got ",
            to_text(save.slot));
      if (!step.python) flow.require(save.source, step);
      flow.add(save.slot);
    }
  }
  const Step end{.name = "outputs"};
  flow.require({Kind::Main, plan.size()}, end);
  for (const Value& output : plan.extra_outputs) flow.require(output, end);
  return flow;
}

bool in_python_backward(const Plan& plan, int op) {
  return std::ranges::any_of(plan.backward, [&](const Step& step) {
    return step.python && !step.skipped && covers(step, op);
  });
}

void verify_gradients(const Plan& plan, const DataFlow& backward) {
  for (const Value& gradient : plan.gradients) {
    verify_value(gradient, plan);
    const Value extra{Kind::ExtraInput, gradient.op, gradient.name};
    const Value parameter{Kind::Parameter, gradient.op, gradient.name};
    const bool is_input =
        gradient == Value{Kind::Grad, 0} ||
        (gradient.kind == Kind::ExtraInputGrad && has_value(plan.extra_inputs, extra)) ||
        (gradient.kind == Kind::ParameterGrad && has_value(plan.parameters, parameter));
    check(is_input, "[plan] gradients must be those of the plan's inputs, got ", to_text(gradient));
    const PlannedOp& op = plan.ops[std::min(gradient.op, plan.size() - 1)];
    if (gradient.kind == Kind::ExtraInputGrad && op.native) {
      const OpDeclaration& row = declaration(op.kind);
      check(!row.is_integer(gradient.name), "[plan] gradients must be of floating tensors, got ",
            to_text(gradient));
      check(!row.is_constant(gradient.name), "[plan] gradients must not be of constants, got ",
            to_text(gradient));
    }
    const Value result = plan.result_of(gradient);
    check(backward.has(result) || in_python_backward(plan, gradient.op),
          "[plan] backward must yield the gradients that the plan names, got no ", to_text(result));
  }
}

void verify_backward(const Plan& plan, const DataFlow& forward) {
  std::set<Value> known = {{Kind::Grad, plan.size()}};
  for (const Value& parameter : plan.parameters) known.insert(parameter);
  for (const Value& state : plan.states) known.insert(state);
  for (const Value& output : plan.extra_outputs) {
    known.insert({Kind::ExtraOutputGrad, output.op, output.name});
  }
  DataFlow flow(std::move(known));
  for (auto step = plan.backward.rbegin(); step != plan.backward.rend(); ++step) {
    if (step->skipped) continue;
    for (const Instruction& instruction : step->instructions) {
      for_each_value(instruction.arguments, [&](const Value& value) {
        if (value.kind == Kind::Slot && !flow.has(value)) {
          // A Python forward step fills the slots of the ops it covers when it runs.
          check(forward.has(value) || inside_python_step(plan, value.op), "[plan] backward step '",
                step->name, "' must read a slot that forward saves, got ", to_text(value));
          flow.add(value);
        } else if (value.kind == Kind::Shape) {
          check(forward.has({Kind::Main, value.op}) || inside_python_step(plan, value.op),
                "[plan] backward step '", step->name,
                "' must read the shape of what forward writes, got ", to_text(value));
          flow.add(value);
        }
      });
      flow.run(instruction, *step);
    }
    if (step->python) {
      add_python_results(*step, plan, /*forward=*/false, flow);
      for (const Route& route : plan.routes) {
        if (covers(*step, route.input.op)) {
          flow.add({Kind::ExtraOutputGrad, route.output.op, route.output.name});
        }
      }
    }
  }
  verify_gradients(plan, flow);
}

}  // namespace

void verify(const Plan& plan) {
  check(plan.size() > 0, "[plan] a plan must have an op, got none");
  verify_ops(plan);
  verify_coverage(plan.forward, plan.size(), "forward");
  verify_coverage(plan.backward, plan.size(), "backward");
  verify_joint_pairs(plan.forward, plan.backward);
  verify_joint_pairs(plan.backward, plan.forward);
  const DataFlow forward = verify_forward(plan);
  check(plan.needs_backward() == !plan.gradients.empty(), "[plan] gradients must be named where a ",
        "backward is needed, and only there, got ", plan.gradients.size(), " with first_backward ",
        plan.first_backward);
  if (plan.needs_backward()) verify_backward(plan, forward);
}

}  // namespace transformer_ops
