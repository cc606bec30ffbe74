#include "python/plan_data.h"

#include <pybind11/stl.h>

#include "fuser/declaration.h"

namespace transformer_ops::python {
namespace {

// Returns kind, op, name and part.
py::tuple value_to_python(const Value& value) {
  return py::make_tuple(name_of(value.kind), value.op, value.name, name_of(value.part));
}

py::list values_to_python(const std::vector<Value>& values) {
  py::list list;
  for (const Value& value : values) list.append(value_to_python(value));
  return list;
}

// A constant becomes a tuple, and a list of values a list.
py::object argument_to_python(const Argument& argument) {
  if (const auto* value = std::get_if<Value>(&argument)) return value_to_python(*value);
  if (const auto* list = std::get_if<ValueList>(&argument)) return values_to_python(*list);
  if (const auto* constant = std::get_if<Attribute>(&argument)) {
    return py::make_tuple(std::visit([](const auto& item) { return py::cast(item); }, *constant));
  }
  return py::none();
}

py::object dtype_to_python(const std::optional<DType>& dtype) {
  return dtype ? py::object(py::str(to_text(*dtype))) : py::none();
}

py::dict step_to_python(const Step& step) {
  py::list instructions, saves;
  for (const Instruction& instruction : step.instructions) {
    py::list arguments, results;
    for (const Argument& argument : instruction.arguments) {
      arguments.append(argument_to_python(argument));
    }
    for (const Result& result : instruction.results) {
      const auto* const list = std::get_if<ValueList>(&result);
      results.append(list == nullptr ? py::object(value_to_python(std::get<Value>(result)))
                                     : py::object(values_to_python(*list)));
    }
    instructions.append(py::make_tuple(instruction.target, arguments, results));
  }
  for (const Save& save : step.saves) {
    saves.append(py::make_tuple(value_to_python(save.slot), value_to_python(save.source)));
  }
  py::dict row;
  row["name"] = step.name;
  row["ops"] = step.ops;
  row["instructions"] = instructions;
  row["saves"] = saves;
  row["python"] = step.python ? py::object(py::int_(*step.python)) : py::none();
  row["joint"] = step.joint;
  row["skipped"] = step.skipped;
  return row;
}

// (op, index) of an extra tensor.
py::tuple place_of(const Plan& plan, const Value& value) {
  const PlannedOp& op = plan.ops[value.op];
  const bool is_input = value.kind == Value::Kind::ExtraInput;
  return py::make_tuple(value.op,
                        position_of(is_input ? op.extra_inputs : op.extra_outputs, value.name));
}

}  // namespace

py::dict plan_to_python(const Plan& plan) {
  py::dict data;
  py::list ops, forward, backward, routes;
  for (const PlannedOp& op : plan.ops) {
    py::dict attributes;
    for (const auto& [name, value] : op.attributes) {
      attributes[py::str(name)] =
          std::visit([](const auto& item) { return py::cast(item); }, value);
    }
    ops.append(py::make_tuple(op.kind, attributes, op.native));
  }
  for (const Step& step : plan.forward) forward.append(step_to_python(step));
  for (const Step& step : plan.backward) backward.append(step_to_python(step));
  for (const Route& route : plan.routes) {
    routes.append(py::make_tuple(value_to_python(route.input), value_to_python(route.output)));
  }
  data["ops"] = ops;
  data["extra_inputs"] = values_to_python(plan.extra_inputs);
  data["parameters"] = values_to_python(plan.parameters);
  data["states"] = values_to_python(plan.states);
  data["extra_outputs"] = values_to_python(plan.extra_outputs);
  std::vector<std::vector<std::string>> parameters(plan.ops.size());
  for (const Value& value : plan.whole_parameters()) parameters[value.op].push_back(value.name);
  std::vector<bool> wants_parameters(plan.ops.size());
  for (const Value& value : plan.gradients) {
    if (value.kind == Value::Kind::ParameterGrad) wants_parameters[value.op] = true;
  }
  std::vector<std::vector<std::string>> slots(plan.ops.size());
  for (int i = 0; i < plan.size(); ++i) {
    const PlannedOp& op = plan.ops[i];
    if (op.native) slots[i] = declaration(op.kind).slot_tensors(op.attributes);
  }
  py::dict fed_by;
  for (const Route& route : plan.routes)
    fed_by[place_of(plan, route.input)] = place_of(plan, route.output);
  py::list visible;
  for (const Value& value : plan.extra_outputs) visible.append(place_of(plan, value));
  data["parameter_names"] = parameters;
  data["slots"] = slots;
  data["wants_parameters"] = wants_parameters;
  data["fed_by"] = fed_by;
  data["visible"] = visible;
  data["routes"] = routes;
  data["first_backward"] = plan.first_backward;
  data["autocast"] = dtype_to_python(plan.autocast);
  data["recipe"] = plan.recipe == nullptr ? py::none() : py::object(py::str(to_text(*plan.recipe)));
  data["saved"] = to_text(plan.saved.format);
  data["forward"] = forward;
  data["backward"] = backward;
  return data;
}

py::list near_misses_to_python(const std::vector<NearMiss>& near_misses) {
  py::list list;
  for (const NearMiss& miss : near_misses) {
    list.append(py::make_tuple(miss.fusion, to_text(miss.pass), py::tuple(py::cast(miss.ops)),
                               miss.reason, miss.matched, miss.structural));
  }
  return list;
}

}  // namespace transformer_ops::python
