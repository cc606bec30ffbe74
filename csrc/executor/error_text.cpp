#include "executor/error_text.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <typeinfo>

namespace transformer_ops {
namespace {

struct TracedNames {
  std::string text;
  std::vector<OpName> names;
};

TracedNames& traced_names() {
  static thread_local TracedNames found;
  return found;
}

// Exported programs and C++ programs have no names, so the plan's kinds and numbers are used.
std::vector<OpName> names_of(const Program& program) {
  if (!program.names.empty()) return program.names;
  const TracedNames& traced = traced_names();
  const bool is_traced = !traced.text.empty() && traced.text == to_text(program.plan);
  if (is_traced) return traced.names;
  std::vector<OpName> names;
  for (size_t i = 0; i < program.plan.ops.size(); ++i) {
    names.push_back({program.plan.ops[i].kind, std::to_string(i), "plan"});
  }
  return names;
}

const Step* step_of(const Plan& plan, int op, bool is_forward) {
  const auto& steps = is_forward ? plan.forward : plan.backward;
  const auto found = std::ranges::find(steps, op, &Step::first);
  return found == steps.end() ? nullptr : &*found;
}

std::string without_namespace(const std::string& name) {
  const size_t colons = name.find("::");
  return colons == std::string::npos ? name : name.substr(colons + 2);
}

// The argument of the call that an error text is about; its name is the first or the last word.
struct Subject {
  Value value;
  bool is_list = false;
  bool is_first = false;
};

// In a plan, an extra input that reads another op is that op's output.
Value read_as(const Plan& plan, const Step& step, const Value& value) {
  const auto reads = [&](const Route& route) {
    return route.output == value && route.input.op >= step.first() && route.input.op <= step.last();
  };
  const auto route = std::ranges::find_if(plan.routes, reads);
  return route == plan.routes.end() ? value : route->input;
}

std::optional<Subject> argument_of(const Plan& plan, const Program::Call& call, const Step& step,
                                   const std::string& argument) {
  const auto& fields = call.schema->arguments();
  const auto field = std::ranges::find(fields, argument, &c10::Argument::name);
  const auto instruction = std::ranges::find_if(step.instructions, [&](const Instruction& one) {
    return without_namespace(one.target) == without_namespace(call.name);
  });
  if (field == fields.end() || instruction == step.instructions.end()) return {};
  const size_t position = field - fields.begin();
  if (position >= instruction->arguments.size()) return {};
  const Argument& given = instruction->arguments[position];
  if (const auto* const list = std::get_if<ValueList>(&given)) {
    if (list->empty()) return {};
    return Subject{.value = list->front(), .is_list = true};
  }
  const auto* const value = std::get_if<Value>(&given);
  if (value == nullptr) return {};
  return Subject{.value = read_as(plan, step, *value)};
}

std::optional<Subject> subject_of(const Plan& plan, const Program::Line& line, const Step& step,
                                  const std::string& rest) {
  const std::string first = rest.substr(0, rest.find(' '));
  if (std::holds_alternative<Program::Cast>(line.what)) {
    return Subject{.value = {Value::Kind::Main, step.first()}};
  }
  const auto* const call = std::get_if<Program::Call>(&line.what);
  if (call == nullptr) return {};
  auto subject = argument_of(plan, *call, step, first);
  if (subject) {
    subject->is_first = true;
    return subject;
  }
  return argument_of(plan, *call, step, rest.substr(rest.rfind(' ') + 1));
}

// Boundary i is the input of op i; its gradient belongs to the op before it.
int op_of(const Value& value, const Step& step) {
  const int op = value.kind == Value::Kind::Grad ? value.op - 1 : value.op;
  return std::clamp(op, step.first(), step.last());
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

// The basic ops of one module share one name and one path.
std::vector<OpName> distinct(const std::vector<OpName>& names, const std::vector<int>& ops) {
  std::vector<OpName> found;
  for (const int op : ops) {
    if (found.empty() || found.back() != names[op]) found.push_back(names[op]);
  }
  return found;
}

std::string place_of(const std::vector<OpName>& names) {
  std::vector<std::string> paths;
  for (const OpName& name : names) {
    if (!name.path.empty()) paths.push_back(name.path);
  }
  if (paths.empty()) return "";
  return std::string(paths.size() == 1 ? " (op " : " (ops ") + joined(paths) + " of the " +
         names.front().whole + ")";
}

std::atomic<RenameHostError> host_rename = nullptr;

}  // namespace

std::string named_error(const Program& program, const Program::Line& line, bool is_forward,
                        const std::string& text) {
  // Host steps name themselves.
  const auto* const call = std::get_if<Program::Call>(&line.what);
  if (call == nullptr && !std::holds_alternative<Program::Cast>(line.what)) return text;
  const Step* const step = step_of(program.plan, line.op, is_forward);
  const size_t end = text.find("] ");
  if (step == nullptr || !text.starts_with("[") || end == std::string::npos) return text;
  const std::string head = text.substr(1, end - 1);
  const auto is_kind = [&](int op) { return head == program.plan.ops[op].kind; };
  const auto by_kind = std::ranges::find_if(step->ops, is_kind);
  const bool is_call =
      head == step->name ||
      (call != nullptr && (head == call->name || head == without_namespace(call->name)));
  if (!is_call && by_kind == step->ops.end()) return text;
  std::string rest = text.substr(end + 2);
  std::vector<int> ops = step->ops;
  if (by_kind != step->ops.end()) {
    ops = {*by_kind};
  } else if (const auto subject = subject_of(program.plan, line, *step, rest)) {
    ops = {op_of(subject->value, *step)};
    const bool has_name = subject->value.kind == Value::Kind::Parameter ||
                          subject->value.kind == Value::Kind::ExtraInput;
    // The text itself says which tensor of a list it is about.
    if (subject->is_first && has_name && !subject->is_list)
      rest = subject->value.name + rest.substr(rest.find(' '));
  }
  const std::vector<OpName> names = distinct(names_of(program), ops);
  std::vector<std::string> kinds;
  for (const OpName& name : names) kinds.push_back(name.name);
  return "[" + joined(kinds) + "] " + rest + place_of(names);
}

void rethrow_as(const c10::Error& error, const std::string& text) {
  if (typeid(error) == typeid(c10::Error)) TORCH_CHECK(false, text);
  if (typeid(error) == typeid(c10::ValueError)) TORCH_CHECK_VALUE(false, text);
  if (typeid(error) == typeid(c10::IndexError)) TORCH_CHECK_INDEX(false, text);
  if (typeid(error) == typeid(c10::NotImplementedError)) TORCH_CHECK_NOT_IMPLEMENTED(false, text);
  throw;
}

void set_rename_host_error(RenameHostError rename) { host_rename = rename; }

RenameHostError rename_host_error() { return host_rename; }

void note_traced_names(std::string text, std::vector<OpName> names) {
  traced_names() = {std::move(text), std::move(names)};
}

}  // namespace transformer_ops
