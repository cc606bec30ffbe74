#include "fuser/recompute.h"

#include <algorithm>
#include <map>
#include <set>

#include "fuser/casts.h"
#include "fuser/declaration.h"
#include "fuser/slots.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// Boundaries between which ops only pass the tensor through count as one: the first of them.
class Recomputation {
 public:
  Recomputation(Plan& plan, const Analysis& analysis)
      : plan_(plan),
        analysis_(analysis),
        dtypes_(analysis.dtypes()),
        policy_(analysis.key().policies.recompute) {
    for (const Step& step : plan_.forward) {
      casts_.insert(casts_.end(), step.ops.size(), input_cast(step));
    }
  }

  void run() {
    for (const Step& step : plan_.backward) find_reads(step);
    for (auto step = plan_.backward.rbegin(); step != plan_.backward.rend(); ++step) {
      if (!step->skipped) rewrite(*step);
    }
    for (Step& step : plan_.forward) {
      std::erase_if(step.saves, [&](const Save& save) { return replaced_.contains(save.slot); });
    }
  }

 private:
  // The state of the main tensor at a boundary in backward.
  enum class State {
    Lost,      // neither saved nor recomputed
    Saved,     // saved by forward
    Computed,  // recomputed
  };

  const OpDeclaration& row(int op) const { return declaration(plan_.ops[op].kind); }

  bool is_native(int op) const { return plan_.ops[op].native; }

  bool hands_on(int op) const {
    if (!is_native(op)) return false;
    const PlannedOp& planned = plan_.ops[op];
    const bool inactive =
        row(op).inactive && row(op).inactive(planned.attributes, planned.training);
    if (is_quantized(row(op), op, plan_.recipe)) return false;
    return inactive || row(op).hands_on || !row(op).forward_schema.has_result("output");
  }

  int first_same(int boundary) const {
    while (boundary > 0 && hands_on(boundary - 1)) --boundary;
    return boundary;
  }

  // The dtype in which an op reads its main tensor.
  DType input_dtype(int op) const { return casts_[op].value_or(dtypes_[op]); }

  // ---- what backward reads

  void find_reads(const Step& step) {
    if (step.skipped) return;
    for (const Value& slot : slots_read(plan_, step)) {
      read_.insert(slot);
      if (is_main(slot)) main_slots_[first_same(slot.op)].push_back(slot);
    }
  }

  static bool is_main(const Value& value) {
    return value.kind == Kind::Slot && value.name == "input";
  }

  // ---- what can be recomputed

  State state(int boundary) {
    boundary = first_same(boundary);
    if (const auto known = states_.find(boundary); known != states_.end()) return known->second;
    const State kept = main_slots_.contains(boundary) ? State::Saved : State::Lost;
    return states_[boundary] = can_compute(boundary) ? State::Computed : kept;
  }

  // Does the policy cover the op?
  bool is_covered(int op) const {
    if (asks_for_recompute(plan_.ops[op].attributes)) return true;
    if (!is_product(op)) return policy_ >= Recompute::Cheap;
    // Operands that forward rounds or decodes are not there in backward.
    return policy_ == Recompute::Products && !analysis_.is_quantized(op) &&
           !has_quantized_parameter(op);
  }

  bool is_product(int op) const { return !row(op).operands.empty(); }

  bool has_quantized_parameter(int op) const {
    return std::ranges::any_of(row(op).parameters, [&](const std::string& name) {
      return !analysis_.parameter_format(op, name).is_exact();
    });
  }

  bool can_compute(int boundary) {
    const int op = boundary - 1;
    if (op < 0 || !is_native(op) || row(op).recompute_schema.empty()) return false;
    if (!is_covered(op)) return false;
    return std::ranges::all_of(row(op).recompute_schema.arguments, [&](const auto& field) {
      if (field.name == "input") return has_input(op);
      const bool is_slot = row(op).has_slot(field.name) && !row(op).has_parameter(field.name);
      return !is_slot || read_.contains({Kind::Slot, op, field.name});
    });
  }

  bool has_input(int op) {
    const State found = state(op);
    if (found == State::Computed) return computed_dtype(op) == input_dtype(op);
    if (found == State::Saved && kept_slot(op) != nullptr) return true;
    return row(op).recompute_adds_input && step_that_takes(op) != nullptr;
  }

  // The forward step whose input is that of `op`; null if `op` is not the first op of a step.
  Step* step_that_takes(int op) {
    const auto step = std::ranges::lower_bound(plan_.forward, op, {}, &Step::first);
    const bool starts_here = step != plan_.forward.end() && step->first() == op;
    return starts_here && !step->python ? &*step : nullptr;
  }

  // Saves the input of `op` only for the recomputation.
  Value added_slot(int op) {
    const Value slot{Kind::Slot, op, "input"};
    Step& step = *step_that_takes(op);
    if (!std::ranges::count(step.saves, slot, &Save::slot)) {
      step.saves.push_back({slot, taken_input(step)});
    }
    return slot;
  }

  // The dtype in which the main tensor at a boundary is recomputed.
  DType computed_dtype(int boundary) const { return input_dtype(first_same(boundary) - 1); }

  // A slot that saves the input of `op` in the dtype that `op` reads; null if there is none.
  const Value* kept_slot(int op) const {
    const Value* found = nullptr;
    const auto slots = main_slots_.find(first_same(op));
    if (slots == main_slots_.end()) return nullptr;
    for (const Value& slot : slots->second) {
      if (slot.op == op) return &slot;
      if (input_dtype(slot.op) == input_dtype(op)) found = &slot;
    }
    return found;
  }

  // ---- rewriting backward

  void rewrite(Step& step) {
    std::vector<Instruction> before;
    for (Instruction& instruction : step.instructions) {
      for_each_value(instruction.arguments, [&](Value& slot) {
        if (is_computed(slot)) slot = compute_slot(slot, step, before);
      });
    }
    if (step.python && !step.joint) {
      for (const Value& slot : slots_read(plan_, step)) {
        if (!is_computed(slot)) continue;
        const Value value = compute_slot(slot, step, before);
        if (value != slot) before.push_back({.arguments = {value}, .results = {slot}});
      }
    }
    step.instructions.insert(step.instructions.begin(), before.begin(), before.end());
  }

  bool is_computed(const Value& slot) { return is_main(slot) && state(slot.op) == State::Computed; }

  Value compute_slot(const Value& slot, const Step& step, std::vector<Instruction>& code) {
    replaced_.insert(slot);
    const Value computed = compute(slot.op, step, code);
    const auto cast_to = casts_[slot.op];
    if (!cast_to || *cast_to == computed_dtype(slot.op)) return computed;
    // The gradient of an op's output has the dtype that the op computed in.
    code.push_back({"recompute_cast", {gradient(step), computed}, {slot}});
    return slot;
  }

  Value compute(int boundary, const Step& step, std::vector<Instruction>& code) {
    boundary = first_same(boundary);
    const Value result{Kind::Main, boundary};
    if (!written_.insert(boundary).second) return result;
    const int op = boundary - 1;
    const Schema& schema = row(op).recompute_schema;
    Instruction call{.target = schema.name, .results = {result}};
    for (const auto& field : schema.arguments) {
      call.arguments.push_back(argument(op, field.name, step, code));
    }
    code.push_back(std::move(call));
    return result;
  }

  Argument argument(int op, const std::string& name, const Step& step,
                    std::vector<Instruction>& code) {
    if (name == "grad_output") return gradient(step);
    if (name == "input") {
      if (state(op) == State::Computed) return compute(op, step, code);
      const Value* const kept = kept_slot(op);
      return kept != nullptr ? *kept : added_slot(op);
    }
    if (row(op).has_parameter(name)) return parameter(op, name, code);
    const auto attribute = plan_.ops[op].attributes.find(name);
    if (attribute != plan_.ops[op].attributes.end()) return attribute->second;
    if (row(op).has_attribute(name)) return None{};
    return Value{Kind::Slot, op, name};
  }

  // A parameter, or all tensors of a list; none if it is optional and None.
  Argument parameter(int op, const std::string& name, std::vector<Instruction>& code) const {
    ValueList found;
    for (const std::string& tensor : analysis_.tensors_of(op, name)) {
      if (analysis_.has_parameter(op, tensor)) found.push_back(cast_parameter(op, tensor, code));
    }
    if (found.empty()) return None{};
    return row(op).list_of(name) != nullptr ? Argument(found) : Argument(found[0]);
  }

  // A parameter in the dtype that the op reads. Only products need that of their input.
  Value cast_parameter(int op, const std::string& name, std::vector<Instruction>& code) const {
    const Value parameter{Kind::Parameter, op, name};
    const int k = position_of(analysis_.ops()[op].parameters, name);
    if (!is_product(op) || analysis_.parameters(op)[k].dtype == input_dtype(op)) return parameter;
    const Value cast{Kind::Temporary, op, "recompute_" + name};
    code.push_back(make_cast(parameter, input_dtype(op), cast));
    return cast;
  }

  static Value gradient(const Step& step) { return {Kind::Grad, step.last() + 1}; }

  Plan& plan_;
  const Analysis& analysis_;
  const std::vector<DType>& dtypes_;  // those of the main tensor, by boundary
  Recompute policy_;
  std::vector<std::optional<DType>> casts_;  // the dtype to which the step that covers an op casts
                                             // the main tensor
  std::set<Value> read_;
  std::map<int, std::vector<Value>> main_slots_;  // by boundary
  std::map<int, State> states_;                   // by boundary
  std::set<int> written_;                         // boundaries that an earlier step recomputes
  std::set<Value> replaced_;
};

}  // namespace

void recompute_outputs(Plan& plan, const Analysis& analysis) {
  Recomputation(plan, analysis).run();
}

bool asks_for_recompute(const Attributes& attributes) {
  const auto found = attributes.find("activation_recompute_in_mlp");
  return found != attributes.end() && std::get<bool>(found->second);
}

}  // namespace transformer_ops
