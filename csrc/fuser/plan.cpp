#include "fuser/plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

struct KindRow {
  Kind kind;
  const char* prefix;  // used in texts
  const char* name;
};

// Longer prefixes come first, so that "dp1.weight" is not parsed as a "d...".
constexpr std::array<KindRow, 12> kKinds = {{
    {Kind::ParameterGrad, "dp", "parameter_grad"},
    {Kind::ExtraInputGrad, "de", "extra_input_grad"},
    {Kind::ExtraOutputGrad, "do", "extra_output_grad"},
    {Kind::Main, "x", "main"},
    {Kind::Grad, "g", "grad"},
    {Kind::Parameter, "p", "parameter"},
    {Kind::ExtraInput, "e", "extra_input"},
    {Kind::ExtraOutput, "o", "extra_output"},
    {Kind::State, "st", "state"},
    {Kind::Slot, "s", "slot"},
    {Kind::Shape, "n", "shape"},
    {Kind::Temporary, "t", "temporary"},
}};

const KindRow& row_of(Kind kind) { return *std::ranges::find(kKinds, kind, &KindRow::kind); }

// The names of parts, in the order of Value::Part.
constexpr std::array<const char*, 3> kParts = {"", "codes", "scale"};

// Moves the part at the end of a name, if there is one, to value.part.
void take_part(Value& value, const std::string& text) {
  const size_t dot = value.name.find('.');
  if (dot == std::string::npos) return;
  const auto part = std::ranges::find(kParts, value.name.substr(dot + 1));
  check(part != kParts.begin() && part != kParts.end(),
        "[plan] a part must be codes or scale, got '", text, "'");
  value.part = static_cast<Value::Part>(part - kParts.begin());
  value.name.resize(dot);
}

}  // namespace

std::string to_text(const Value& value) {
  std::string text = row_of(value.kind).prefix + std::to_string(value.op);
  if (is_boundary(value.kind)) return text;
  text += "." + value.name;
  return value.part == Value::Part::Whole ? text : text + "." + name_of(value.part);
}

bool is_boundary(Value::Kind kind) {
  return kind == Kind::Main || kind == Kind::Grad || kind == Kind::Shape;
}

const char* name_of(Value::Kind kind) { return row_of(kind).name; }
const char* name_of(Value::Part part) { return kParts[static_cast<size_t>(part)]; }

Value parse_value(const std::string& text) {
  for (const auto& [kind, prefix, name] : kKinds) {
    if (!text.starts_with(prefix)) continue;
    const char* begin = text.data() + std::string(prefix).size();
    const char* end = text.data() + text.size();
    Value value{kind};
    const auto [rest, error] = std::from_chars(begin, end, value.op);
    if (error != std::errc()) continue;
    if (is_boundary(kind) && rest == end) return value;
    if (is_boundary(kind) || rest == end || *rest != '.' || rest + 1 == end) continue;
    value.name = std::string(rest + 1, end);
    take_part(value, text);
    return value;
  }
  fail("[plan] a value must read like x1, g1, p1.weight or s1.input, got '", text, "'");
}

// Each kind of tensor, and the kind of its gradient.
constexpr std::pair<Value::Kind, Value::Kind> kGradients[] = {
    {Value::Kind::Main, Value::Kind::Grad},
    {Value::Kind::Parameter, Value::Kind::ParameterGrad},
    {Value::Kind::ExtraInput, Value::Kind::ExtraInputGrad},
    {Value::Kind::ExtraOutput, Value::Kind::ExtraOutputGrad},
};

Value gradient_of(Value tensor) {
  for (const auto& [kind, gradient] : kGradients) {
    if (tensor.kind == kind) return {gradient, tensor.op, std::move(tensor.name)};
  }
  fail("[plan] value must have a gradient, got ", to_text(tensor));
}

Value tensor_of(Value gradient) {
  for (const auto& [tensor, kind] : kGradients) {
    if (gradient.kind == kind) return {tensor, gradient.op, std::move(gradient.name)};
  }
  fail("[plan] value must be a gradient, got ", to_text(gradient));
}

std::span<const Value> values_of(const std::vector<Value>& values, int op) {
  const auto first = std::ranges::lower_bound(values, op, {}, &Value::op);
  return {first, std::ranges::upper_bound(first, values.end(), op, {}, &Value::op)};
}

bool has_value(const std::vector<Value>& values, const Value& value) {
  const auto found = values_of(values, value.op);
  return std::ranges::find(found, value) != found.end();
}

Result unused_like(const Result& result) {
  const auto* const value = std::get_if<Value>(&result);
  return value == nullptr ? Result(ValueList()) : Value{Kind::Temporary, value->op, "unused"};
}

bool Instruction::writes(const Value& value) const {
  bool found = false;
  for_each_value(results, [&](const Value& result) { found |= result == value; });
  return found;
}

bool PlannedOp::is_set(const std::string& flag) const {
  const auto attribute = attributes.find(flag);
  return attribute != attributes.end() && attribute->second == Attribute(true);
}

bool Plan::has_python_steps() const {
  const auto is_python = [](const Step& step) { return step.python.has_value(); };
  return std::ranges::any_of(forward, is_python) || std::ranges::any_of(backward, is_python);
}

std::vector<Value> Plan::whole_parameters() const {
  std::vector<Value> whole;
  for (const Value& value : parameters) {
    if (value.part == Value::Part::Whole) whole.push_back(value);
  }
  return whole;
}

Value Plan::result_of(const Value& gradient) const {
  if (gradient.kind != Kind::ParameterGrad || !ops[gradient.op].native) return gradient;
  const PlannedOp& op = ops[gradient.op];
  const OpDeclaration& row = declaration(op.kind);
  const std::string parameter = row.parameter_of(gradient.name);
  const State* const state = row.state_of(parameter, op.attributes);
  if (state == nullptr) return gradient;
  // The gradient of one tensor of a list: the state's name has the tensor's number.
  return {Kind::State, gradient.op, state->name + gradient.name.substr(parameter.size())};
}

bool Plan::has_quantized_parameters() const {
  return std::ranges::any_of(parameters,
                             [](const Value& value) { return value.part != Value::Part::Whole; });
}

bool Plan::saves_codes() const {
  return std::ranges::any_of(forward, [](const Step& step) {
    return std::ranges::any_of(
        step.saves, [](const Save& save) { return save.slot.part == Value::Part::Codes; });
  });
}

}  // namespace transformer_ops
