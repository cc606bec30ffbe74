#include "executor/check_call.h"

#include <sstream>

#include "op/torch_library.h"

namespace transformer_ops {
namespace {

using c10::TypeKind;

struct KindOf {
  const char* operator()(bool) const { return "bool"; }
  const char* operator()(int64_t) const { return "int"; }
  const char* operator()(double) const { return "float"; }
  const char* operator()(const std::string&) const { return "str"; }
  const char* operator()(const std::vector<int64_t>&) const { return "int[]"; }
  const char* operator()(const std::vector<double>&) const { return "float[]"; }
  const char* operator()(const std::vector<bool>&) const { return "bool[]"; }
};

std::string kind_of(const Argument& argument) {
  if (const auto* constant = std::get_if<Attribute>(&argument)) {
    return std::visit(KindOf{}, *constant);
  }
  if (std::holds_alternative<ValueList>(argument)) return "Tensor[]";
  const auto* value = std::get_if<Value>(&argument);
  if (value == nullptr) return "None";
  return value->kind == Value::Kind::Shape ? "int[]" : "Tensor";
}

// The instruction written as a schema, for error texts.
std::string text_of(const Instruction& instruction) {
  std::ostringstream text;
  text << instruction.target << "(";
  for (size_t i = 0; i < instruction.arguments.size(); ++i) {
    text << (i > 0 ? ", " : "") << kind_of(instruction.arguments[i]);
  }
  text << ") -> (";
  for (size_t i = 0; i < instruction.results.size(); ++i) {
    const bool is_list = std::holds_alternative<ValueList>(instruction.results[i]);
    text << (i > 0 ? ", " : "") << (is_list ? "Tensor[]" : "Tensor");
  }
  text << ")";
  return text.str();
}

bool is_integer(const c10::Type& type) {
  return type.kind() == TypeKind::IntType || type.kind() == TypeKind::SymIntType;
}

bool is_tensor(const c10::Type& type) { return type.kind() == TypeKind::TensorType; }

bool fits(const Result& result, const c10::Type& type) {
  if (std::holds_alternative<Value>(result)) return is_tensor(type);
  const auto* const list = type.castRaw<c10::ListType>();
  return list != nullptr && is_tensor(*list->getElementType());
}

bool fits_list(const Argument& argument, const c10::Type& element, std::optional<int32_t> length) {
  const auto fits_length = [&](size_t size) {
    return !length || size == static_cast<size_t>(*length);
  };
  if (const auto* constant = std::get_if<Attribute>(&argument)) {
    if (const auto* flags = std::get_if<std::vector<bool>>(constant)) {
      return element.kind() == TypeKind::BoolType && fits_length(flags->size());
    }
    if (const auto* numbers = std::get_if<std::vector<double>>(constant)) {
      return element.kind() == TypeKind::FloatType && fits_length(numbers->size());
    }
    if (const auto* sizes = std::get_if<std::vector<int64_t>>(constant)) {
      // An empty list fits both integers and tensors.
      const bool fits = is_integer(element) || (sizes->empty() && !is_tensor(element));
      return fits && fits_length(sizes->size());
    }
  }
  if (const auto* const list = std::get_if<ValueList>(&argument)) {
    return is_tensor(element) && std::ranges::all_of(*list, [](const Value& value) {
             return value.kind != Value::Kind::Shape;
           });
  }
  // An absent list is empty.
  if (std::holds_alternative<None>(argument)) return is_tensor(element);
  const auto* value = std::get_if<Value>(&argument);
  return value != nullptr && value->kind == Value::Kind::Shape && is_integer(element) && !length;
}

bool fits(const Argument& argument, const c10::Type& type, std::optional<int32_t> length) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    return std::holds_alternative<None>(argument) ||
           fits(argument, *optional->getElementType(), length);
  }
  if (const auto* list = type.castRaw<c10::ListType>()) {
    return fits_list(argument, *list->getElementType(), length);
  }
  const std::string kind = kind_of(argument);
  switch (type.kind()) {
    case TypeKind::TensorType:
      return kind == "Tensor";
    case TypeKind::BoolType:
      return kind == "bool";
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return kind == "int";
    case TypeKind::FloatType:
      return kind == "float";
    case TypeKind::StringType:
      return kind == "str";
    default:
      return false;
  }
}

bool fits(const Instruction& instruction, const c10::FunctionSchema& schema) {
  const auto& fields = schema.arguments();
  if (instruction.arguments.size() != fields.size() || schema.is_vararg()) return false;
  for (size_t i = 0; i < fields.size(); ++i) {
    // real_type distinguishes SymInt from int; N is the length of a bool[N].
    if (!fits(instruction.arguments[i], *fields[i].real_type(), fields[i].N())) return false;
  }
  if (instruction.results.size() != schema.returns().size()) return false;
  for (size_t i = 0; i < instruction.results.size(); ++i) {
    if (!fits(instruction.results[i], *schema.returns()[i].type())) return false;
  }
  return true;
}

void check_call(const Instruction& instruction, const c10::FunctionSchema& schema) {
  TORCH_CHECK(fits(instruction, schema) && !schema.is_mutable(),
              "[plan] call must fit the op's schema '", schema, "', got '", text_of(instruction),
              "'; a plan's text belongs to the release of transformer_ops that made it");
}

}  // namespace

Callee find_op(const std::string& name) {
  const auto callee = find_callee(name);
  TORCH_CHECK(callee, "[plan] op must be registered, got '", torch_name(name), "'");
  return *callee;
}

void check_calls(const Plan& plan) {
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const Step& step : *steps) {
      for (const Instruction& instruction : step.instructions) {
        if (instruction.target.empty() || instruction.target == kCast) continue;
        check_call(instruction, *find_op(instruction.target).schema);
      }
    }
  }
}

}  // namespace transformer_ops
