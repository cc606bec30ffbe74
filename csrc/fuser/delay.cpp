#include "fuser/delay.h"

#include <algorithm>
#include <array>

#include "fuser/declaration.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// The state of a parameter's gradient that is computed later; null if there is none.
const State* delayed_state(const Analysis& analysis, int op) {
  const OpNode& node = analysis.ops()[op];
  if (!node.native) return nullptr;
  const OpDeclaration& row = declaration(node.kind);
  for (const std::string& parameter : row.parameters) {
    if (!analysis.has_parameter(op, parameter)) continue;
    if (!analysis.parameter_requires_grad(op, parameter)) continue;
    const State* const state = row.state_of(parameter, node.attributes);
    if (state != nullptr && state->later) return state;
  }
  return nullptr;
}

std::vector<bool> mask_of(const Instruction& call, const OpDeclaration& row) {
  const auto& fields = row.backward_schema.arguments;
  const auto mask = std::ranges::find(fields, "output_mask", &Schema::Field::name);
  return std::get<std::vector<bool>>(std::get<Attribute>(call.arguments[mask - fields.begin()]));
}

// Does the result go into this state, or into the states of a list's tensors?
bool fills(const Result& result, int op, const State& state) {
  bool found = false;
  std::array<Result, 1> results = {result};
  for_each_value(results, [&](const Value& value) {
    found |= value.kind == Kind::State && value.op == op && state.has_value(value.name);
  });
  return found;
}

// The same call, restricted to the gradients of the mask.
Instruction part_of(Instruction call, const OpDeclaration& row, const std::vector<bool>& mask) {
  const auto& fields = row.backward_schema.arguments;
  for (size_t k = 0; k < fields.size(); ++k) {
    if (fields[k].name == "output_mask") {
      call.arguments[k] = Attribute(mask);
    } else if (fields[k].may_be_absent() && !row.is_read(fields[k].name, mask)) {
      call.arguments[k] = None{};
    }
  }
  for (size_t k = 0; k < mask.size(); ++k) {
    if (!mask[k]) call.results[k] = unused_like(call.results[k]);
  }
  return call;
}

bool is_full_list(const Result& result) {
  const auto* const list = std::get_if<ValueList>(&result);
  return list != nullptr && !list->empty();
}

// Gives lists of gradients a call of their own if another gradient goes into a buffer. torch cannot
// functionalize an op that writes to a buffer and returns lists.
void give_lists_apart(const OpNode& node, int op, Step& step) {
  if (!node.native || declaration(node.kind).states.empty()) return;
  const OpDeclaration& row = declaration(node.kind);
  const auto call =
      std::ranges::find(step.instructions, row.backward_schema.name, &Instruction::target);
  if (call == step.instructions.end()) return;
  const auto is_accumulated = [&](const Result& result) {
    return std::ranges::any_of(row.states,
                               [&](const State& state) { return fills(result, op, state); });
  };
  const Instruction whole = *call;
  const auto into = std::ranges::find_if(whole.results, is_accumulated);
  if (into == whole.results.end() || !is_full_list(*into)) return;
  std::vector<bool> first = mask_of(whole, row), lists(first.size(), false);
  for (size_t k = 0; k < first.size(); ++k) {
    lists[k] = is_full_list(whole.results[k]) && &whole.results[k] != &*into;
    first[k] = first[k] && !lists[k];
  }
  if (std::ranges::find(lists, true) == lists.end()) return;
  *call = part_of(whole, row, lists);
  step.instructions.insert(call, part_of(whole, row, first));
}

}  // namespace

void delay_gradients(const Analysis& analysis, Step& step) {
  for (const int op : step.ops) {
    const State* const state = delayed_state(analysis, op);
    if (state == nullptr) {
      give_lists_apart(analysis.ops()[op], op, step);
      continue;
    }
    const OpDeclaration& row = declaration(analysis.ops()[op].kind);
    const auto is_delayed = [&](const Result& result) { return fills(result, op, *state); };
    const auto call = std::ranges::find_if(step.instructions, [&](const Instruction& each) {
      return std::ranges::any_of(each.results, is_delayed);
    });
    const Instruction whole = *call;
    std::vector<bool> now = mask_of(whole, row), later(now.size(), false);
    const auto k = std::ranges::find_if(whole.results, is_delayed) - whole.results.begin();
    now[k] = false;
    later[k] = true;
    *call = part_of(whole, row, later);
    if (std::ranges::find(now, true) == now.end()) continue;
    step.instructions.insert(call, part_of(whole, row, now));
  }
}

std::optional<std::string> delayed_gradient(const Match& match, Pass pass) {
  if (pass == Pass::Forward) return std::nullopt;
  for (const int op : match.places) {
    if (op < 0 || delayed_state(match.analysis, op) == nullptr) continue;
    return "op " + std::to_string(op) + " leaves the gradient of its weight for later";
  }
  return std::nullopt;
}

}  // namespace transformer_ops
