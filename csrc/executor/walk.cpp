#include "executor/walk.h"

#include <typeinfo>

namespace transformer_ops {
namespace {

// An op of torch's own does not say in which op of the plan it failed.
[[noreturn]] void rethrow(const Program::Call& call, const c10::Error& error) {
  const std::string name = call.op.schema().name();
  if (call.typed != nullptr || typeid(error) != typeid(c10::Error)) throw;
  TORCH_CHECK(false, "[", name.substr(name.find("::") + 2), "] ", error.what_without_backtrace());
}

void run_call(const Program::Call& call, const Shapes& shapes, Tensors& values,
              torch::jit::Stack& stack) {
  stack.clear();
  for (const auto& operand : call.operands) {
    if (const auto* load = std::get_if<Program::Load>(&operand)) {
      Tensor& value = values[load->value];
      load->last ? stack.emplace_back(std::move(value)) : stack.emplace_back(value);
    } else if (const auto* constant = std::get_if<Program::Constant>(&operand)) {
      stack.push_back(constant->value);
    } else {
      stack.emplace_back(shapes[std::get<Program::ShapeOf>(operand).index]);
    }
  }
  try {
    call.op.callBoxed(stack);
  } catch (const c10::Error& error) {
    rethrow(call, error);
  }
  for (size_t i = 0; i < call.results.size(); ++i) {
    values[call.results[i]] = std::move(stack[i]).toTensor();
  }
}

}  // namespace

void walk(const Program::Code& code, const Shapes& shapes, Tensors& values) {
  torch::jit::Stack stack;
  stack.reserve(12);
  for (const auto& line : code.lines) {
    if (const auto* call = std::get_if<Program::Call>(&line.what)) {
      run_call(*call, shapes, values, stack);
    } else if (const auto* cast = std::get_if<Program::Cast>(&line.what)) {
      if (values[cast->from].defined()) {
        values[cast->to] = cast_floating(cast->step.c_str(), values[cast->from], cast->dtype);
      }
    } else {
      const auto& copy = std::get<Program::Copy>(line.what);
      Tensor& to = values[copy.to];
      to = to.defined() ? to + values[copy.from] : values[copy.from];
    }
    for (const int value : line.dead) values[value].reset();
  }
}

}  // namespace transformer_ops
