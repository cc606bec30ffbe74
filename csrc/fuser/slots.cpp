#include "fuser/slots.h"

#include "fuser/declaration.h"

namespace transformer_ops {

std::vector<Value> slots_read(const Plan& plan, const Step& step) {
  std::vector<Value> slots;
  for (const Instruction& instruction : step.instructions) {
    for_each_value(instruction.arguments, [&](const Value& value) {
      if (value.kind == Value::Kind::Slot) slots.push_back(value);
    });
  }
  if (!step.python || step.joint) return slots;
  for (const int op : step.ops) {
    if (!plan.ops[op].native) continue;
    const PlannedOp& planned = plan.ops[op];
    for (const std::string& name : declaration(planned.kind).slot_tensors(planned.attributes)) {
      slots.push_back({Value::Kind::Slot, op, name});
    }
  }
  return slots;
}

}  // namespace transformer_ops
