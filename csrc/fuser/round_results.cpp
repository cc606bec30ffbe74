#include "fuser/round_results.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <span>

#include "fuser/fork_safe_mutex.h"
#include "fuser/quantize.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// Those that are not as most are. A library that brings more may be loaded while others plan.
struct Targets {
  ForkSafeMutex mutex;
  std::map<std::string, TargetTraits> rows;
};

Targets& targets() {
  static Targets targets;
  return targets;
}

TargetTraits traits_of(const std::string& target) {
  const std::lock_guard lock(targets().mutex);
  const auto row = targets().rows.find(target);
  return row == targets().rows.end() ? TargetTraits() : row->second;
}

// A call that rounds an operand of a product: what it reads, and what it makes of it.
struct Rounding {
  Value from;
  Value to;
  std::string format;
  std::string dtype;
};

const std::string& text_of(const Argument& argument) {
  return std::get<std::string>(std::get<Attribute>(argument));
}

std::optional<Rounding> rounding_of(const Instruction& call) {
  const bool is_saved = call.target == std::string(kRoundCall) + "_saved";
  if (!is_saved && call.target != kRoundCall) return std::nullopt;
  const size_t first = is_saved ? 1 : 0;
  Rounding found{std::get<Value>(call.arguments[first]), std::get<Value>(call.results[0]),
                 text_of(call.arguments[first + 1]), text_of(call.arguments[first + 2])};
  // An op that rounds its main tensor gives a boundary, which others may see.
  if (found.to.kind != Kind::Temporary || rows_of_block(found.format) == 0) return std::nullopt;
  return found;
}

// One pass of a plan.
class RoundResults {
 public:
  // Its steps in the order they run. `kept`: values that others see.
  RoundResults(std::vector<Step*> steps, const std::vector<DType>& dtypes, std::set<Value> kept)
      : steps_(std::move(steps)), dtypes_(dtypes), kept_(std::move(kept)) {
    for (const Step* const step : steps_) {
      for (const Save& save : step->saves) kept_.insert(save.source);
      if (step->python) kept_.insert({{Kind::Main, step->first()}, {Kind::Grad, step->last() + 1}});
      for (const Instruction& call : step->instructions) note_reads(call);
    }
  }

  void run() {
    for (Step* const step : steps_) {
      for (Instruction& call : step->instructions) {
        if (!traits_of(call.target).rounds) continue;
        const auto* const result = std::get_if<Value>(&call.results[0]);
        const auto found = result == nullptr ? roundings_.end() : roundings_.find(*result);
        if (found != roundings_.end() && fits(*result, found->second)) take(call, found->second);
      }
    }
    for (Step* const step : steps_) {
      std::erase_if(step->instructions, [&](const Instruction& call) {
        const auto rounding = rounding_of(call);
        return rounding && taken_.contains(rounding->to);
      });
    }
  }

 private:
  void note_reads(const Instruction& call) {
    if (auto rounding = rounding_of(call)) {
      roundings_[rounding->from].push_back(std::move(*rounding));
      return;
    }
    const size_t first = traits_of(call.target).reads_first ? 0 : 1;
    std::span<const Argument> read = std::span(call.arguments).subspan(first);
    for_each_value(read, [&](const Value& value) { kept_.insert(value); });
  }

  // A boundary has the dtype of the op that reads it, which is what it is rounded in.
  bool fits(const Value& value, const std::vector<Rounding>& roundings) const {
    if (value.kind != Kind::Main && value.kind != Kind::Grad) return false;
    if (kept_.contains(value) || roundings.size() > 2) return false;
    const std::string dtype = to_text(dtypes_[value.op]);
    return std::ranges::all_of(roundings,
                               [&](const Rounding& rounding) { return rounding.dtype == dtype; });
  }

  // The value itself becomes the first rounding of it.
  void take(Instruction& call, const std::vector<Rounding>& roundings) {
    call.target += "_rounded";
    const bool has_two = roundings.size() == 2;
    call.arguments.push_back(Attribute(roundings[0].format));
    call.arguments.push_back(Attribute(has_two ? roundings[1].format : std::string()));
    call.results.push_back(has_two ? Result(roundings[1].to) : unused_like(call.results[0]));
    for (const Rounding& rounding : roundings) taken_.insert(rounding.to);
    for (Step* const step : steps_) replace_argument(*step, roundings[0].to, roundings[0].from);
  }

  std::vector<Step*> steps_;
  const std::vector<DType>& dtypes_;
  std::set<Value> kept_;
  std::map<Value, std::vector<Rounding>> roundings_;
  std::set<Value> taken_;
};

}  // namespace

void round_results(Plan& plan, const std::vector<DType>& dtypes) {
  std::vector<Step*> forward, backward;
  for (Step& step : plan.forward) forward.push_back(&step);
  for (auto step = plan.backward.rbegin(); step != plan.backward.rend(); ++step) {
    if (!step->skipped) backward.push_back(&*step);
  }
  std::set<Value> outputs(plan.extra_outputs.begin(), plan.extra_outputs.end());
  outputs.insert({Kind::Main, plan.size()});
  RoundResults(std::move(forward), dtypes, std::move(outputs)).run();
  RoundResults(std::move(backward), dtypes, {plan.gradients.begin(), plan.gradients.end()}).run();
}

void set_traits(const std::string& target, TargetTraits traits) {
  const std::lock_guard lock(targets().mutex);
  targets().rows[target] = traits;
}

}  // namespace transformer_ops
