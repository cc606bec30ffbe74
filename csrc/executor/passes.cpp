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

bool contains(const std::vector<int>& values, int value) {
  return std::ranges::find(values, value) != values.end();
}

// The values that lines compute anew, so that none is an alias of an argument. Empty if a line
// changes a given value or a state.
std::set<int> made_values(const Program::Code& code, const std::vector<int>& given) {
  std::set<int> made, written;
  for (const Program::Line& line : code.lines) {
    if (std::holds_alternative<Program::Record>(line.what)) return {};
    const auto* const copy = std::get_if<Program::Copy>(&line.what);
    if (copy != nullptr && contains(given, copy->to)) return {};
    const auto* const call = std::get_if<Program::Call>(&line.what);
    for (const int value : values_written(line)) {
      // The first copy is an alias; later ones are sums.
      const bool is_new =
          copy != nullptr ? written.contains(value) : call != nullptr && call->typed != nullptr;
      is_new ? void(made.insert(value)) : void(made.erase(value));
      written.insert(value);
    }
  }
  return made;
}

// The values of `wanted`, each once, that are not given; none if the pass cannot be one op.
std::vector<int> results_of(const Program::Code& code, const std::vector<int>& wanted,
                            const std::vector<int>& given) {
  const auto is_call = [](const Program::Line& line) {
    return std::holds_alternative<Program::Call>(line.what);
  };
  if (std::ranges::count_if(code.lines, is_call) < 2) return {};
  const std::set<int> made = made_values(code, given);
  std::vector<int> results;
  for (const int value : wanted) {
    if (value < 0 || contains(given, value) || contains(results, value)) continue;
    if (!made.contains(value)) return {};
    results.push_back(value);
  }
  const auto is_known = [&](const Program::Line& line) {
    const auto* const take = std::get_if<Program::TakeMetadata>(&line.what);
    return take == nullptr || contains(given, take->value) || contains(results, take->value);
  };
  return std::ranges::all_of(code.lines, is_known) ? results : std::vector<int>();
}

std::vector<int> joined(std::initializer_list<const std::vector<int>*> lists) {
  std::vector<int> all;
  for (const auto* const list : lists) all.insert(all.end(), list->begin(), list->end());
  return all;
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

void note_results(Program& program) {
  if (program.has_host_steps || !program.updated.empty()) return;
  program.forward.results =
      results_of(program.forward, joined({&program.outputs, &program.saved}), program.inputs);
  if (program.always_reads_metadata) return;
  std::vector<int> given = joined({&program.output_grads, &program.loads});
  for (const auto& [_, value] : program.more_loads) given.push_back(value);
  program.backward.results = results_of(program.backward, program.input_grads, given);
}

}  // namespace transformer_ops
