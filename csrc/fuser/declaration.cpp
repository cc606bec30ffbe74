#include "fuser/declaration.h"

#include <algorithm>
#include <mutex>

#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/recompute.h"

namespace transformer_ops {
namespace {

// The most tensors that a list may have. Nobody needs more, and each tensor has a name.
constexpr int64_t kMostTensors = 100'000;

// The declarations by kind. The lock is for libraries loaded while others plan.
struct Declarations {
  ForkSafeMutex mutex;
  std::map<std::string, OpDeclaration> rows;
};

Declarations& all() {
  static Declarations all;
  return all;
}

const OpDeclaration* find(const std::string& kind) {
  const std::lock_guard lock(all().mutex);
  const auto row = all().rows.find(kind);
  return row == all().rows.end() ? nullptr : &row->second;
}

const OpDeclaration* find_by(Schema OpDeclaration::*schema, const std::string& name) {
  const std::lock_guard lock(all().mutex);
  const auto row = std::ranges::find_if(
      all().rows, [&](const auto& each) { return (each.second.*schema).name == name; });
  return row == all().rows.end() ? nullptr : &row->second;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

std::string without_number(const std::string& name) {
  return name.substr(0, name.find_last_not_of("0123456789") + 1);
}

// Raises if two things have one name, because schemas are bound by name.
void check_names(const OpDeclaration& row) {
  std::vector<std::string> names = {"input", "output"};
  for (const auto* list :
       {&row.parameters, &row.attributes, &row.flags, &row.extra_inputs, &row.extra_outputs}) {
    for (const std::string& name : *list) {
      check(!contains(names, name), "[declaration] '", row.kind, "' must have one '", name,
            "', got two");
      names.push_back(name);
    }
  }
  for (const std::string& name : row.integers) {
    check(row.has_extra_input(name) || row.has_extra_output(name), "[declaration] '", row.kind,
          "' must have integers among its extra tensors, got '", name, "'");
  }
  for (const std::string& name : row.constants) {
    check(row.has_extra_input(name), "[declaration] '", row.kind,
          "' must have constants among its extra inputs, got '", name, "'");
  }
  for (const std::string& name : row.detached) {
    check(row.has_extra_output(name), "[declaration] '", row.kind,
          "' must have what is detached among its extra outputs, got '", name, "'");
  }
  for (const Slot& slot : row.slots) {
    const bool is_known =
        !slot.when || row.has_attribute(slot.when->attribute) || row.has_flag(slot.when->attribute);
    check(is_known, "[declaration] '", row.kind, "' must have the attribute of slot '", slot.name,
          "', got '", slot.when ? slot.when->attribute : "", "'");
  }
  for (const State& state : row.states) {
    check(row.has_parameter(state.parameter) && row.has_attribute(state.attribute),
          "[declaration] '", row.kind, "' must have the parameter and the attribute of state '",
          state.name, "', got '", state.parameter, "' and '", state.attribute, "'");
  }
}

// Checks lists: each has a count, and names that nothing else uses.
void check_lists(const OpDeclaration& row) {
  for (const ListedParameter& list : row.lists) {
    const std::string place = "[declaration] '" + row.kind + "' list '" + list.parameter + "' ";
    check(row.has_parameter(list.parameter), place, "must be one of the parameters, got none");
    check(row.has_attribute(list.count), place, "must have its count as an attribute, got '",
          list.count, "'");
    check(list.single.empty() || row.has_attribute(list.single), place,
          "must have its flag as an attribute, got '", list.single, "'");
    for (const std::string& name : row.parameters) {
      check(name == list.parameter || without_number(name) != list.parameter, place,
            "must have its names to itself, got parameter '", name, "'");
    }
  }
  for (const Schema* schema : {&row.forward_schema, &row.backward_schema}) {
    for (const Schema::Field& field : schema->arguments) {
      const bool is_list = row.list_of(field.name) != nullptr;
      check(!row.has_parameter(field.name) || is_list == (field.type == "Tensor[]"),
            "[declaration] '", row.kind, "' must take '", field.name, "' as ",
            is_list ? "Tensor[]" : "one tensor", ", got ", field.type);
    }
  }
}

// Checks that a gradient which is computed later has a call of its own.
void check_delays(const OpDeclaration& row) {
  const auto& fields = row.backward_schema.arguments;
  const bool has_mask =
      std::ranges::find(fields, "output_mask", &Schema::Field::name) != fields.end();
  for (const State& state : row.states) {
    check(!state.later || has_mask, "[declaration] '", row.kind,
          "' must have an output_mask for state '", state.name, "', got '", row.backward, "'");
  }
}

// Checks that backward can call what recomputes the output.
void check_recompute(const OpDeclaration& row) {
  const Schema& schema = row.recompute_schema;
  if (schema.empty()) return;
  const std::string place = "[declaration] recompute of '" + row.kind + "' must ";
  check(schema.results.size() == 1 && schema.has_result("output"), place,
        "return 'output' alone, got '", row.recompute, "'");
  for (const Schema::Field& field : schema.arguments) {
    const bool is_given = field.name == "input" || field.name == "grad_output";
    check(is_given || has_field(row, field.name), place,
          "take input, grad_output, slots, parameters, extra inputs and attributes, got '",
          field.name, "'");
  }
}

}  // namespace

bool Slot::is_read_with(const Attributes& set) const {
  if (!when) return true;
  const auto found = set.find(when->attribute);
  return found != set.end() && found->second == when->value;
}

bool OpDeclaration::has_parameter(const std::string& name) const {
  return contains(parameters, name);
}

bool OpDeclaration::has_extra_input(const std::string& name) const {
  return contains(extra_inputs, name);
}

bool OpDeclaration::has_extra_output(const std::string& name) const {
  return contains(extra_outputs, name);
}

bool OpDeclaration::has_attribute(const std::string& name) const {
  return contains(attributes, name);
}

bool OpDeclaration::has_flag(const std::string& name) const { return contains(flags, name); }

bool OpDeclaration::has_slot(const std::string& name) const {
  return std::ranges::find(slots, name, &Slot::name) != slots.end();
}

bool OpDeclaration::has_operand(const std::string& name) const { return contains(operands, name); }

bool OpDeclaration::is_integer(const std::string& extra_tensor) const {
  return contains(integers, extra_tensor);
}

bool OpDeclaration::is_constant(const std::string& extra_tensor) const {
  return contains(constants, extra_tensor);
}

bool OpDeclaration::asks_training() const {
  return inactive != nullptr || forward_schema.has_argument(kTraining);
}

bool OpDeclaration::is_detached(const std::string& extra_output) const {
  return contains(detached, extra_output);
}

const ListedParameter* OpDeclaration::list_of(const std::string& parameter) const {
  const auto list = std::ranges::find(lists, parameter, &ListedParameter::parameter);
  return list == lists.end() ? nullptr : &*list;
}

std::vector<std::string> OpDeclaration::tensors_of(const std::string& parameter,
                                                   const Attributes& set) const {
  const ListedParameter* const list = list_of(parameter);
  if (list == nullptr) return {parameter};
  const auto single = set.find(list->single);
  if (single != set.end() && single->second == Attribute(true)) return {parameter};
  const auto found = set.find(list->count);
  const auto* const count = found == set.end() ? nullptr : std::get_if<int64_t>(&found->second);
  check(count != nullptr && *count >= 1 && *count <= kMostTensors, "[", kind, "] ", list->count,
        " must be a number of tensors, 1 to ", kMostTensors, ", got ",
        found == set.end() ? "none" : to_text(found->second));
  std::vector<std::string> names;
  for (int64_t i = 0; i < *count; ++i) names.push_back(parameter + std::to_string(i));
  return names;
}

std::vector<std::string> OpDeclaration::parameter_tensors(const Attributes& set) const {
  std::vector<std::string> names;
  for (const std::string& parameter : parameters) {
    std::ranges::move(tensors_of(parameter, set), std::back_inserter(names));
  }
  return names;
}

std::vector<std::string> OpDeclaration::slot_tensors(const Attributes& set) const {
  std::vector<std::string> names;
  for (const Slot& slot : slots)
    std::ranges::move(tensors_of(slot.name, set), std::back_inserter(names));
  return names;
}

std::string OpDeclaration::parameter_of(const std::string& tensor) const {
  if (has_parameter(tensor)) return tensor;
  const std::string name = without_number(tensor);
  return name != tensor && list_of(name) != nullptr ? name : "";
}

bool State::has_value(const std::string& value) const {
  return value == name || without_number(value) == name;
}

const State* OpDeclaration::state_of(const std::string& parameter, const Attributes& set) const {
  const auto takes = [&](const State& state) {
    const auto attribute = set.find(state.attribute);
    return state.parameter == parameter && attribute != set.end() &&
           attribute->second == Attribute(true);
  };
  const auto state = std::ranges::find_if(states, takes);
  return state == states.end() ? nullptr : &*state;
}

bool OpDeclaration::is_read(const std::string& argument, const std::vector<bool>& mask) const {
  const auto slot = std::ranges::find(slots, argument, &Slot::name);
  if (slot == slots.end() || slot->needed_for.empty()) return true;
  for (size_t k = 0; k < mask.size(); ++k) {
    const std::string of = backward_schema.results[k].name.substr(5);  // the part after "grad_"
    if (mask[k] && contains(slot->needed_for, of)) return true;
  }
  return false;
}

bool OpDeclaration::is_optional(const std::string& name) const {
  if (const auto* const list = list_of(parameter_of(name))) return list->optional;
  const auto& fields = forward_schema.arguments;
  const auto field = std::ranges::find(fields, name, &Schema::Field::name);
  return field != fields.end() && field->type.ends_with('?');
}

const std::map<std::string, OpDeclaration>& declarations() { return all().rows; }

bool is_declared(const std::string& kind) { return find(kind) != nullptr; }

const OpDeclaration* find_declaration_of(const std::string& forward) {
  return find_by(&OpDeclaration::forward_schema, forward);
}

const OpDeclaration* find_declaration_of_backward(const std::string& backward) {
  return find_by(&OpDeclaration::backward_schema, backward);
}

const OpDeclaration& declaration(const std::string& kind) {
  const OpDeclaration* row = find(kind);
  check(row != nullptr, "[plan] op kind must be declared, got '", kind, "'");
  return *row;
}

OpDeclaration checked(OpDeclaration row) {
  row.forward_schema = parse_schema(row.forward);
  row.backward_schema = parse_schema(row.backward);
  row.recompute_schema = parse_schema(row.recompute);
  check_names(row);
  check_lists(row);
  check_delays(row);
  check_recompute(row);
  return row;
}

void add_declaration(OpDeclaration row) {
  row = checked(std::move(row));
  const std::lock_guard lock(all().mutex);
  const std::string kind = row.kind;
  const bool is_new = all().rows.emplace(kind, std::move(row)).second;
  check(is_new, "[declaration] op kind must be declared once, got '", kind, "'");
}

bool is_quantized(const OpDeclaration& row, int op, const Recipe* recipe) {
  const bool may_round = !row.operands.empty() && !row.exact_operands;
  return recipe != nullptr && may_round && !recipe->of(op).is_exact();
}

int64_t slot_bits(const OpDeclaration& row, const std::string& slot, int64_t width,
                  int64_t element_bits) {
  if (!row.parameter_of(slot).empty()) return 0;
  if (row.slot_bits) return row.slot_bits(slot, width, element_bits);
  const bool is_tensor = slot == "input" || slot == "output";
  if (!is_tensor && slot != "mask") return std::max<int64_t>(32, element_bits);
  if (width < 0) return -1;
  return is_tensor ? width * element_bits : width;
}

}  // namespace transformer_ops
