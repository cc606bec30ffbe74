#include "executor/program.h"

#include <ATen/core/List.h>

#include <algorithm>

#include "executor/host.h"
#include "executor/partial_backward.h"

namespace transformer_ops {

template class Handle<const Program>;
template class Handle<HostCall>;

namespace {

// The values that one kind of line reads and writes.
struct ValuesOf {
  std::vector<int> read = {};
  std::vector<int> written = {};

  void add(std::vector<int>& to, int value) const {
    if (value >= 0) to.push_back(value);
  }
  void operator()(const Program::Call& call) {
    for (const auto& operand : call.operands) {
      if (const auto* load = std::get_if<Program::Load>(&operand)) read.push_back(load->value);
      if (const auto* list = std::get_if<Program::LoadList>(&operand)) {
        for (const auto& load : *list) read.push_back(load.value);
      }
    }
    written = call.results;
  }
  void operator()(const Program::Cast& cast) { read = {cast.from}, written = {cast.to}; }
  void operator()(const Program::Copy& copy) { read = {copy.from}, written = {copy.to}; }
  void operator()(const Program::Record& record) { read = {record.found, record.state}; }
  void operator()(const Program::TakeMetadata& take) { read = {take.value}; }
  void operator()(const Program::FitDtype& fit) { read = {fit.value}, written = {fit.value}; }
  void operator()(const Program::HostForward& call) {
    for (const int value : call.arguments) add(read, value);
    for (const auto& dtype : call.dtypes) add(read, dtype.parameter);
    for (const int value : call.parameters) add(read, value);
    written = call.results;
  }
  void operator()(const Program::HostBackward& call) {
    for (const auto& gradient : call.gradients) add(read, gradient.value);
    for (const auto& saved : call.saved) {
      for (const int value : saved.slots) add(read, value);
    }
    for (const auto& result : call.results) add(written, result.value);
  }
};

ValuesOf values_of(const Program::Line& line) {
  ValuesOf values;
  std::visit(values, line.what);
  return values;
}

}  // namespace

std::vector<int> values_read(const Program::Line& line) { return values_of(line).read; }
std::vector<int> values_written(const Program::Line& line) { return values_of(line).written; }

bool reads_metadata(const Program::Line& line) {
  const auto* call = std::get_if<Program::Call>(&line.what);
  if (call == nullptr) {
    return std::holds_alternative<Program::FitDtype>(line.what) ||
           std::holds_alternative<Program::HostBackward>(line.what);
  }
  const auto is_look = [](const auto& operand) {
    return std::holds_alternative<Program::ShapeOf>(operand);
  };
  return std::ranges::any_of(call->operands, is_look);
}

SharedProgram share(Program program) {
  program.parts = std::make_shared<PartialBackwards>();
  return SharedProgram(std::make_unique<const Program>(std::move(program)));
}

c10::IValue to_ivalue(const Attribute& attribute) {
  struct Converter {
    c10::IValue operator()(bool value) const { return value; }
    c10::IValue operator()(int64_t value) const { return value; }
    c10::IValue operator()(double value) const { return value; }
    c10::IValue operator()(const std::string& value) const { return value; }
    c10::IValue operator()(const std::vector<int64_t>& value) const { return value; }
    c10::IValue operator()(const std::vector<double>& value) const { return value; }
    c10::IValue operator()(const std::vector<bool>& value) const { return value; }
  };
  return std::visit(Converter{}, attribute);
}

}  // namespace transformer_ops
