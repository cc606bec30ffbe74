#include "executor/call_text.h"

#include "fuser/attribute.h"

namespace transformer_ops {
namespace {

std::string constant_text(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return to_text(Attribute(value.toBool()));
  if (value.isInt()) return to_text(Attribute(value.toInt()));
  if (value.isDouble()) return to_text(Attribute(value.toDouble()));
  if (value.isString()) return to_text(Attribute(value.toStringRef()));
  if (value.isIntList()) return to_text(Attribute(value.toIntVector()));
  if (value.isDoubleList()) return to_text(Attribute(value.toDoubleVector()));
  const auto flags = value.toBoolList();
  return to_text(Attribute(std::vector<bool>(flags.begin(), flags.end())));
}

std::string text_of(const Program::Operand& operand) {
  if (const auto* const constant = std::get_if<Program::Constant>(&operand)) {
    return constant_text(constant->value);
  }
  const auto* const list = std::get_if<Program::LoadList>(&operand);
  if (list == nullptr) return "%";
  std::string text;
  for (size_t i = 0; i < list->size(); ++i) text += text.empty() ? "%" : ", %";
  return "[" + text + "]";
}

}  // namespace

c10::IValue call_text(const Program::Call& call) {
  std::string text;
  for (const auto& operand : call.operands) {
    TORCH_CHECK(!std::holds_alternative<Program::ShapeOf>(operand), "[plan] call of ", call.name,
                " must take tensors and constants, got a shape");
    text += (text.empty() ? "" : ", ") + text_of(operand);
  }
  return call.name + "(" + text + ")";
}

}  // namespace transformer_ops
