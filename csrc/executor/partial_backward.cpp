#include "executor/partial_backward.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "executor/call_text.h"
#include "executor/passes.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

using Line = Program::Line;

// This is more sets of gradients than a training loop asks for. Beyond it, the cache is cleared.
constexpr size_t kMostParts = 64;

// The live results of a call: for each result of its schema, is any of its tensors live?
std::vector<bool> live_results(const Program::Call& call, const std::vector<bool>& is_live) {
  std::vector<bool> live;
  auto next = call.results.begin();
  const auto take = [&](int count) {
    const auto end = next + count;
    live.push_back(std::any_of(next, end, [&](int value) { return is_live[value]; }));
    next = end;
  };
  if (call.counts.empty()) {
    for (size_t i = 0; i < call.results.size(); ++i) take(1);
  } else {
    for (const int count : call.counts) take(count < 0 ? 1 : count);
  }
  return live;
}

// Removes the results of lists that the mask does not select.
void drop_lists(Program::Call& call, const std::vector<bool>& mask) {
  size_t first = 0;
  for (size_t i = 0; i < call.counts.size(); ++i) {
    const int count = call.counts[i];
    if (i >= mask.size() || mask[i] || count < 0) {
      first += std::abs(count);
      continue;
    }
    const auto drop = [&](std::vector<int>& list) {
      const auto begin = list.begin() + static_cast<std::ptrdiff_t>(first);
      list.erase(begin, begin + count);
    };
    drop(call.results);
    drop(call.result_ops);
    if (call.accumulates && call.accumulates->first > first) call.accumulates->first -= count;
    call.counts[i] = 0;
  }
}

// Makes the call skip unwanted gradients, if its schema has a mask.
void narrow_operands(Program::Call& call, const std::vector<bool>& live) {
  const auto& fields = call.schema->arguments();
  const auto place = std::ranges::find(fields, "output_mask", &c10::Argument::name);
  if (place == fields.end()) return;
  auto& constant = std::get<Program::Constant>(call.operands[place - fields.begin()]);
  const auto given = constant.value.toBoolList();
  std::vector<bool> mask;
  for (size_t i = 0; i < given.size(); ++i) mask.push_back(given.get(i) && live[i]);
  // Results after the gradients, such as an amax, belong to the first gradient.
  const auto behind = live.begin() + static_cast<std::ptrdiff_t>(mask.size());
  mask[0] = mask[0] || (given.get(0) && std::find(behind, live.end(), true) != live.end());
  constant.value = c10::IValue(mask);
  drop_lists(call, mask);
  if (call.backward_of == nullptr) return;
  for (size_t i = 0; i < fields.size(); ++i) {
    const bool may_be_absent = fields[i].type()->kind() == c10::TypeKind::OptionalType;
    if (may_be_absent && !call.backward_of->is_read(fields[i].name(), mask)) {
      call.operands[i] = Program::Constant{c10::IValue()};
    }
  }
}

void narrow_mask(Program::Call& call, const std::vector<bool>& live) {
  narrow_operands(call, live);
  if (!call.text.isNone()) call.text = call_text(call);
}

void narrow(Program::Call& call, const std::vector<bool>& is_live) {
  if (call.accumulates) {
    auto& [result, first, wanted, op, into, later] = *call.accumulates;
    for (size_t i = 0; i < wanted.size(); ++i) {
      wanted[i] = wanted[i] && is_live[call.results[first + i]];
    }
    if (std::ranges::find(wanted, true) == wanted.end()) call.accumulates.reset();
  }
  narrow_mask(call, live_results(call, is_live));
}

void narrow(Program::HostBackward& call, const std::vector<bool>& is_live) {
  for (auto& result : call.results) {
    if (result.value >= 0 && !is_live[result.value]) result.value = -1;
  }
}

class Prune {
 public:
  Prune(const Program::Code& code, std::vector<bool> is_live)
      : is_live_(std::move(is_live)), is_written_(code.values, false) {
    for (auto line = code.lines.rbegin(); line != code.lines.rend(); ++line) add(*line);
    std::ranges::reverse(lines_);
  }

  std::vector<Line> take_lines() {
    // A recorded number, such as an amax, is kept if the call that computes it runs.
    std::erase_if(lines_, [&](const Line& line) {
      const auto* const record = std::get_if<Program::Record>(&line.what);
      return record != nullptr && !is_written_[record->found];
    });
    return std::move(lines_);
  }

  bool is_read(int value) const { return is_live_[value]; }

 private:
  // Keeps the line if any value that it writes is live.
  void add(Line line) {
    line.dead.clear();
    if (std::holds_alternative<Program::Record>(line.what))
      return lines_.push_back(std::move(line));
    const std::vector<int> written = values_written(line);
    if (std::ranges::none_of(written, [&](int value) { return is_live_[value]; })) return;
    if (auto* const call = std::get_if<Program::Call>(&line.what)) narrow(*call, is_live_);
    if (auto* const host = std::get_if<Program::HostBackward>(&line.what)) narrow(*host, is_live_);
    for (const int value : values_read(line)) is_live_[value] = true;
    for (const int value : written) is_written_[value] = true;
    lines_.push_back(std::move(line));
  }

  std::vector<bool> is_live_;
  std::vector<bool> is_written_;
  std::vector<Line> lines_;
};

// All programs share one lock: a fork takes every such lock, and there may be thousands of
// programs. It is never deleted, because a thread may run while static objects are destroyed.
ForkSafeMutex& rows_mutex = *new ForkSafeMutex;

}  // namespace

PartialBackward partial_backward(const Program& program, const std::vector<bool>& wanted) {
  std::vector<int> kept;
  std::vector<bool> is_live(program.backward.values, false);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i] || program.input_grads[i] < 0) continue;
    kept.push_back(program.input_grads[i]);
    is_live[kept.back()] = true;
  }
  Prune prune(program.backward, std::move(is_live));
  PartialBackward part{.code = {prune.take_lines(), program.backward.values}};
  for (const int value : program.loads) {
    if (!prune.is_read(value)) part.unread.push_back(value);
  }
  for (const auto& [_, value] : program.more_loads) {
    if (!prune.is_read(value)) part.unread.push_back(value);
  }
  mark_dead(part.code, {&kept});
  return part;
}

std::shared_ptr<const PartialBackward> PartialBackwards::find_or_make(
    const Program& program, const std::vector<bool>& wanted) {
  if (auto found = find(wanted)) return found;
  auto made = std::make_shared<const PartialBackward>(partial_backward(program, wanted));
  Rows evicted;  // freed after the lock is released
  const std::lock_guard lock(rows_mutex);
  if (rows_.size() >= kMostParts) std::swap(rows_, evicted);
  return rows_.try_emplace(wanted, std::move(made)).first->second;
}

std::shared_ptr<const PartialBackward> PartialBackwards::find(const std::vector<bool>& wanted) {
  const std::lock_guard lock(rows_mutex);
  const auto row = rows_.find(wanted);
  return row == rows_.end() ? nullptr : row->second;
}

}  // namespace transformer_ops
