#include "executor/weight_cache_key.h"

#include "fuser/quantize.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;
using Made = WeightCache::Call;

Made::Weight weight_of(const Plan& plan, const Value& parameter, int value) {
  return {value, "[" + plan.ops[parameter.op].kind + "] " + parameter.name};
}

// Records an operand that is a state or the first parameter; returns false for any other.
bool take(const Plan& plan, const Value& value, const Program::Operand& operand, Made& made) {
  const auto* const load = std::get_if<Program::Load>(&operand);
  if (load != nullptr && value.kind == Kind::State) {
    made.states.push_back(load->value);
    return true;
  }
  if (load == nullptr || value.kind != Kind::Parameter || !made.weights.empty()) return false;
  made.weights.push_back(weight_of(plan, value, load->value));
  return true;
}

// The same for an operand that is a list.
bool take(const Plan& plan, const ValueList& list, const Program::LoadList& loads, Made& made) {
  if (!made.weights.empty() || list.empty()) return false;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].kind != Kind::Parameter) return false;
    made.weights.push_back(weight_of(plan, list[i], loads[i].value));
  }
  return true;
}

}  // namespace

std::optional<Made> weight_cache_key(const Plan& plan, const Instruction& instruction,
                                     const Program::Call& call,
                                     c10::function_ref<Value(const Value&)> origin) {
  Made made{.key = std::string(without_saved(call.name))};
  for (size_t k = call.typed->reads_first ? 0 : 1; k < call.operands.size(); ++k) {
    const Argument& argument = instruction.arguments[k];
    bool is_known = true;
    if (const auto* const constant = std::get_if<Attribute>(&argument)) {
      made.key += ", " + to_text(*constant);
    } else if (const auto* const list = std::get_if<ValueList>(&argument)) {
      ValueList origins;
      for (const Value& value : *list) origins.push_back(origin(value));
      is_known = take(plan, origins, std::get<Program::LoadList>(call.operands[k]), made);
    } else if (const auto* const value = std::get_if<Value>(&argument)) {
      is_known = take(plan, origin(*value), call.operands[k], made);
    }
    if (!is_known) return std::nullopt;
  }
  return made.weights.empty() ? std::nullopt : std::optional(made);
}

}  // namespace transformer_ops
