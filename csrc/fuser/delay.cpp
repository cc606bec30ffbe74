#include "fuser/delay.h"

#include <algorithm>

#include "fuser/declaration.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// The state that takes the gradient of a parameter which is left for later; null where none is.
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

// The same call for the gradients that the mask names.
Instruction part_of(Instruction call, const OpDeclaration& row, const std::vector<bool>& mask) {
  const auto& fields = row.backward_schema.arguments;
  for (size_t k = 0; k < fields.size(); ++k) {
    if (fields[k].name == "output_mask") {
      call.arguments[k] = Attribute(mask);
    } else if (fields[k].type == "Tensor?" && !row.is_read(fields[k].name, mask)) {
      call.arguments[k] = None{};
    }
  }
  for (size_t k = 0; k < mask.size(); ++k) {
    if (!mask[k]) call.results[k] = {Kind::Temporary, call.results[k].op, "unused"};
  }
  return call;
}

}  // namespace

void delay_gradients(const Analysis& analysis, Step& step) {
  for (const int op : step.ops) {
    const State* const state = delayed_state(analysis, op);
    if (state == nullptr) continue;
    const OpDeclaration& row = declaration(analysis.ops()[op].kind);
    const Value delayed{Kind::State, op, state->name};
    const auto call = std::ranges::find_if(step.instructions, [&](const Instruction& each) {
      return std::ranges::find(each.results, delayed) != each.results.end();
    });
    const Instruction whole = *call;
    std::vector<bool> now = mask_of(whole, row), later(now.size(), false);
    const auto k = std::ranges::find(whole.results, delayed) - whole.results.begin();
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
