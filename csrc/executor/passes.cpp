#include "executor/passes.h"

#include <algorithm>
#include <set>

namespace transformer_ops {
namespace {

bool has_only_views(const Program& program) {
  if (program.inputs.size() != 1 || program.outputs.size() != 1) return false;
  const auto is_view = [](const Program::Line& line) {
    const auto* call = std::get_if<Program::Call>(&line.what);
    return call != nullptr && call->name == "aten::reshape";
  };
  return std::ranges::all_of(program.forward.lines, is_view) &&
         std::ranges::all_of(program.backward.lines, is_view);
}

}  // namespace

void mark_skippable(Program::Code& code) {
  std::set<int> needed;  // values that cannot be replaced by zeros
  const auto is_skippable = [&](const std::vector<int>& results) {
    return std::ranges::none_of(results, [&](int value) { return needed.contains(value); });
  };
  for (auto line = code.lines.rbegin(); line != code.lines.rend(); ++line) {
    if (auto* call = std::get_if<Program::Call>(&line->what)) {
      call->skippable = !call->gradients.empty() && is_skippable(call->results);
      std::set<int> zeros;
      for (const auto& grad : call->gradients) {
        if (grad.metadata >= 0) zeros.insert(grad.value);
      }
      for (const int value : values_read(*line)) {
        if (!zeros.contains(value)) needed.insert(value);
      }
    } else if (auto* host = std::get_if<Program::HostBackward>(&line->what)) {
      host->skippable = is_skippable(values_written(*line));
      for (const auto& grad : host->gradients) {
        if (grad.metadata < 0) needed.insert(grad.value);
      }
      for (const auto& saved : host->saved) needed.insert(saved.slots.begin(), saved.slots.end());
    } else if (const auto* cast = std::get_if<Program::Cast>(&line->what)) {
      if (needed.contains(cast->to)) needed.insert(cast->from);
    } else if (const auto* copy = std::get_if<Program::Copy>(&line->what)) {
      if (needed.contains(copy->to)) needed.insert(copy->from);
    }
  }
}

void mark_dead(Program::Code& code, std::initializer_list<const std::vector<int>*> kept) {
  std::vector<bool> seen(code.values, false);
  for (const auto* list : kept) {
    for (const int value : *list) {
      if (value >= 0) seen[value] = true;
    }
  }
  for (auto line = code.lines.rbegin(); line != code.lines.rend(); ++line) {
    const std::vector<int> read = values_read(*line);
    if (auto* call = std::get_if<Program::Call>(&line->what)) {
      const auto mark = [&](Program::Load& load) {
        load.last = !seen[load.value] && std::ranges::count(read, load.value) == 1;
      };
      for (auto& operand : call->operands) {
        if (auto* load = std::get_if<Program::Load>(&operand)) mark(*load);
        if (auto* list = std::get_if<Program::LoadList>(&operand))
          std::ranges::for_each(*list, mark);
      }
    }
    for (const auto& values : {read, values_written(*line)}) {
      for (const int value : values) {
        if (!seen[value]) line->dead.push_back(value);
        seen[value] = true;
      }
    }
  }
}

void note_views(Program& program) {
  program.only_views = has_only_views(program);
  // Torch ops may return a view of an argument.
  std::vector<bool> views(program.backward.values, false);
  for (const Program::Line& line : program.backward.lines) {
    const auto* call = std::get_if<Program::Call>(&line.what);
    if (call == nullptr || call->typed != nullptr) continue;
    for (const int result : call->results) views[result] = true;
  }
  for (const int index : program.input_grads) program.views.push_back(index >= 0 && views[index]);
}

}  // namespace transformer_ops
