#include "fuser/round_results.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <span>

#include "fuser/casts.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/quantize.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// The targets with unusual traits. The lock is for libraries loaded while others plan.
struct Targets {
  ForkSafeMutex mutex;
  std::map<std::string, TargetTraits> rows;
};

Targets& targets() {
  static Targets targets;
  return targets;
}

TargetTraits traits_of(const std::string& target) {
  if (target.ends_with(kSaved)) return {.reads_first = false};
  const std::lock_guard lock(targets().mutex);
  const auto row = targets().rows.find(target);
  return row == targets().rows.end() ? TargetTraits() : row->second;
}

// A call that rounds an operand of a product.
struct FoundRounding {
  Value from;
  Value to;
  NumberFormat format;
  std::string dtype;
  // For a call by a known scale: the scale's arguments, and the results besides the operand. Only
  // forward records the largest magnitude.
  std::vector<Argument> scale = {};
  std::vector<Result> numbers = {};
  Step* step = nullptr;  // the step that has the call, and that alone reads its result

  bool has_blocks() const { return scale.empty(); }
};

const std::string& text_of(const Argument& argument) {
  return std::get<std::string>(std::get<Attribute>(argument));
}

std::optional<FoundRounding> rounding_of(const Instruction& call) {
  const std::string_view target = without_saved(call.target);
  const bool is_scaled = target == std::string(kRoundValues) + kScaled;
  if (!is_scaled && target != kRoundCall) return std::nullopt;
  const std::span read = std::span(call.arguments).subspan(target == call.target ? 0 : 1);
  FoundRounding found{std::get<Value>(read[0]), std::get<Value>(call.results[0]),
                      NumberFormat::named(text_of(*(read.end() - 2))), text_of(read.back())};
  if (is_scaled) {
    found.scale.assign(read.begin() + 1, read.end() - 2);
    found.numbers.assign(call.results.begin() + 1, call.results.end());
  }
  // An op that rounds its main tensor returns a boundary, which others may read.
  if (found.to.kind != Kind::Temporary) return std::nullopt;
  if (found.has_blocks() && found.format.rows_of_block() == 0) return std::nullopt;
  return found;
}

// One pass of a plan.
class RoundResults {
 public:
  // `steps`: in the order they run. `kept`: values that are also read elsewhere.
  RoundResults(std::vector<Step*> steps, const std::vector<DType>& dtypes, std::set<Value> kept)
      : steps_(std::move(steps)), dtypes_(dtypes), kept_(std::move(kept)) {
    for (Step* const step : steps_) {
      for (const Save& save : step->saves) kept_.insert(save.source);
      if (step->python) kept_.insert({{Kind::Main, step->first()}, {Kind::Grad, step->last() + 1}});
      for (const Instruction& call : step->instructions) note_reads(call, step);
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
  void note_reads(const Instruction& call, Step* step) {
    if (auto rounding = rounding_of(call)) {
      rounding->step = step;
      roundings_[rounding->from].push_back(std::move(*rounding));
      return;
    }
    const size_t first = traits_of(call.target).reads_first ? 0 : 1;
    std::span<const Argument> read = std::span(call.arguments).subspan(first);
    for_each_value(read, [&](const Value& value) { kept_.insert(value); });
  }

  // A boundary has the dtype of the op that reads it, which must be the dtype of the rounding.
  bool fits(const Value& value, const std::vector<FoundRounding>& roundings) const {
    if (value.kind != Kind::Main && value.kind != Kind::Grad) return false;
    const bool has_blocks = std::ranges::all_of(roundings, &FoundRounding::has_blocks);
    if (kept_.contains(value) || roundings.size() > (has_blocks ? 2 : 1)) return false;
    const std::string dtype = to_text(dtypes_[value.op]);
    return std::ranges::all_of(
        roundings, [&](const FoundRounding& rounding) { return rounding.dtype == dtype; });
  }

  // The value itself becomes its first rounding.
  void take(Instruction& call, const std::vector<FoundRounding>& roundings) {
    const FoundRounding& first = roundings[0];
    if (first.has_blocks()) {
      round_by_blocks(call, first.format, roundings.size() == 2 ? &roundings[1] : nullptr);
    } else {
      round_by_scale(call, first);
    }
    for (const FoundRounding& rounding : roundings) taken_.insert(rounding.to);
    replace_argument(*first.step, first.to, first.from);
  }

  static void round_by_blocks(Instruction& call, NumberFormat format,
                              const FoundRounding* columns) {
    call.target += kRounded;
    call.arguments.push_back(Attribute(format.name()));
    call.arguments.push_back(
        Attribute(columns == nullptr ? std::string() : columns->format.name()));
    call.results.push_back(columns == nullptr ? unused_like(call.results[0]) : Result(columns->to));
  }

  static void round_by_scale(Instruction& call, const FoundRounding& rounding) {
    const bool has_amax = rounding.numbers.size() == 2;
    call.target += kRoundedBy;
    call.arguments.insert(call.arguments.end(), rounding.scale.begin(), rounding.scale.end());
    call.arguments.push_back(Attribute(rounding.format.name()));
    call.arguments.push_back(Attribute(has_amax));
    call.results.insert(call.results.end(), rounding.numbers.begin(), rounding.numbers.end());
    if (!has_amax) call.results.push_back(unused_like(call.results[0]));
  }

  std::vector<Step*> steps_;
  const std::vector<DType>& dtypes_;
  std::set<Value> kept_;
  std::map<Value, std::vector<FoundRounding>> roundings_;
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
