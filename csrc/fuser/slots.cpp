#include "fuser/slots.h"

#include "fuser/declaration.h"

namespace transformer_ops {

std::vector<Value> slots_read(const Plan& plan, const Step& step) {
  std::vector<Value> slots;
  for (const Instruction& instruction : step.instructions) {
    for (const Argument& argument : instruction.arguments) {
      const auto* value = std::get_if<Value>(&argument);
      if (value != nullptr && value->kind == Value::Kind::Slot) slots.push_back(*value);
    }
  }
  if (!step.python || step.joint) return slots;
  for (const int op : step.ops) {
    if (!plan.ops[op].native) continue;
    for (const Slot& slot : declaration(plan.ops[op].kind).slots) {
      slots.push_back({Value::Kind::Slot, op, slot.name});
    }
  }
  return slots;
}

}  // namespace transformer_ops
