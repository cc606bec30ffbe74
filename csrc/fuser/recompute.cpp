#include "fuser/recompute.h"

#include <algorithm>
#include <map>
#include <set>

#include "fuser/casts.h"
#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/quantize.h"
#include "fuser/slots.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// Boundaries between which ops only pass the tensor through count as one: the first of them.
class Recomputation {
 public:
  Recomputation(Plan& plan, const Analysis& analysis, const std::vector<StepGroup>& groups)
      : plan_(plan),
        analysis_(analysis),
        groups_(groups),
        dtypes_(analysis.dtypes()),
        policy_(analysis.key().policies.recompute) {
    for (const Step& step : plan_.forward) {
      for (const int op : step.ops) {
        casts_.push_back(step.python ? host_cast(op) : input_cast(step));
      }
      for (const Save& save : step.saves) saved_.insert(save.slot);
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

  // A parameter, slot, extra input or attribute of an op, by its name.
  struct OpField {
    int op;
    std::string name;
  };
  struct FirstInput {};    // the input of the first op
  struct LastGradient {};  // the gradient of the output of the step in backward
  // Where an argument of a recomputation comes from.
  using Source = std::variant<None, FirstInput, LastGradient, OpField, Attribute>;

  // What recomputes the main tensor at a boundary: an op, or in one call the ops of a fused forward
  // step up to there.
  struct Producer {
    const Schema* schema;
    std::vector<int> ops;
    std::vector<Source> sources = {};  // for each argument
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

  // The dtype to which runtime/autocast.py casts the main tensor of an op of a Python step.
  std::optional<DType> host_cast(int op) const {
    const auto wanted = analysis_.required_dtype(op);
    return wanted != dtypes_[op] ? wanted : std::nullopt;
  }

  // The dtype in which an op reads its main tensor.
  DType input_dtype(int op) const { return casts_[op].value_or(dtypes_[op]); }

  // ---- what backward reads

  void find_reads(const Step& step) {
    if (step.skipped) return;
    for (const Value& slot : slots_read(plan_, step)) {
      if (!is_saved(slot)) continue;  // a Python step gets None where no gradient needs the slot
      read_.insert(slot);
      if (is_main(slot)) main_slots_[first_same(slot.op)].push_back(slot);
    }
  }

  bool is_saved(const Value& slot) const {
    const auto step =
        std::ranges::find_if(plan_.forward, [&](const Step& one) { return one.last() >= slot.op; });
    return step->python.has_value() || saved_.contains(slot);
  }

  static bool is_main(const Value& value) {
    return value.kind == Kind::Slot && value.name == "input";
  }

  // ---- what can be recomputed

  State state(int boundary) {
    boundary = first_same(boundary);
    if (const auto known = states_.find(boundary); known != states_.end()) return known->second;
    const State kept = main_slots_.contains(boundary) ? State::Saved : State::Lost;
    auto producer = find_producer(boundary);
    if (!producer) return states_[boundary] = kept;
    producers_.emplace(boundary, std::move(*producer));
    return states_[boundary] = State::Computed;
  }

  // Does the policy cover the op?
  bool is_covered(int op) const {
    if (asks_for_recompute(plan_.ops[op].attributes)) return true;
    if (!is_product(op)) return policy_ >= Recompute::Cheap;
    // Operands that forward rounds are not there in backward.
    return policy_ == Recompute::Products && !analysis_.is_quantized(op);
  }

  bool is_product(int op) const { return !row(op).operands.empty(); }

  // The producer at a boundary, if one can run: that of most ops.
  std::optional<Producer> find_producer(int boundary) {
    const int op = boundary - 1;
    if (op < 0 || !is_native(op)) return std::nullopt;
    auto fused = fused_producer(op);
    if (fused && can_run(*fused)) return fused;
    Producer alone = op_producer(op);
    if (can_run(alone)) return alone;
    return std::nullopt;
  }

  Producer op_producer(int op) const {
    Producer producer{&row(op).recompute_schema, {op}};
    for (const Schema::Field& field : producer.schema->arguments) {
      producer.sources.push_back(*find_source(producer.ops, field.name));
    }
    return producer;
  }

  // The call that recomputes the output of `op` for its fused forward step; None if the step has no
  // such call, or its call recomputes the output of another op.
  std::optional<Producer> fused_producer(int op) const {
    const auto group = std::prev(std::ranges::upper_bound(groups_, op, {}, &StepGroup::first));
    if (group->rule == nullptr || group->rule->recompute_schema.empty()) return std::nullopt;
    const Match match{analysis_, group->places};
    const int entry = group->rule->recomputed;
    if (op != (entry < 0 ? match.last() : match.places[entry])) return std::nullopt;
    Producer producer{&group->rule->recompute_schema, group->places};
    std::erase_if(producer.ops, [&](int each) { return each < 0 || each > op; });
    const Bindings bindings = group->rule->bind ? group->rule->bind(match) : Bindings();
    for (const Schema::Field& field : producer.schema->arguments) {
      producer.sources.push_back(fused_source(*group, producer.ops, bindings, field));
    }
    return producer;
  }

  Source fused_source(const StepGroup& group, const std::vector<int>& ops, const Bindings& bindings,
                      const Schema::Field& field) const {
    if (const auto bound = bindings.find(field.name); bound != bindings.end()) {
      if (const auto* constant = std::get_if<Attribute>(&bound->second)) return *constant;
      const auto& source = std::get<Field>(bound->second);
      const int op = group.place(source.op);
      const bool is_computed = source.name == "input" && op != ops.front();
      const bool may_be = std::ranges::count(ops, op) > 0 && !is_computed;
      const auto found = may_be ? find_source({op}, source.name) : std::nullopt;
      check(found.has_value(), "[plan] recompute of '", group.name, "' must bind '", field.name,
            "' to what an op it covers reads, got '", source.name, "' of entry ", source.op);
      return *found;
    }
    if (const auto found = find_source(ops, field.name)) return *found;
    check(group.lacks_an_op() && field.type == "Tensor?", "[plan] recompute of '", group.name,
          "' must bind argument '", field.name, "'");
    return None{};
  }

  // The argument of that name of a call that covers these ops.
  std::optional<Source> find_source(const std::vector<int>& ops, const std::string& name) const {
    if (name == "input") return FirstInput{};
    if (name == "grad_output") return LastGradient{};
    const auto op = std::ranges::find_if(ops, [&](int each) { return has_field(row(each), name); });
    if (op == ops.end()) return std::nullopt;
    return OpField{*op, name};
  }

  bool can_run(const Producer& producer) {
    if (producer.schema->empty()) return false;
    if (!std::ranges::all_of(producer.ops, [&](int op) { return is_covered(op); })) return false;
    return std::ranges::all_of(producer.sources, [&](const Source& source) {
      if (std::holds_alternative<FirstInput>(source)) return has_input(producer.ops.front());
      const auto* const field = std::get_if<OpField>(&source);
      return field == nullptr || is_there(*field);
    });
  }

  // Does backward have it?
  bool is_there(const OpField& field) const {
    const OpDeclaration& op = row(field.op);
    if (op.has_parameter(field.name)) return true;
    if (op.has_slot(field.name)) return read_.contains({Kind::Slot, field.op, field.name});
    return !op.has_extra_input(field.name);
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
    const Producer& producer = producers_.at(boundary);
    Instruction call{.target = producer.schema->name, .results = {result}};
    for (const Source& source : producer.sources) {
      call.arguments.push_back(argument(producer, source, step, code));
    }
    code.push_back(std::move(call));
    return result;
  }

  Argument argument(const Producer& producer, const Source& source, const Step& step,
                    std::vector<Instruction>& code) {
    if (std::holds_alternative<LastGradient>(source)) return gradient(step);
    if (std::holds_alternative<FirstInput>(source)) {
      return input(producer.ops.front(), step, code);
    }
    if (const auto* constant = std::get_if<Attribute>(&source)) return *constant;
    if (std::holds_alternative<None>(source)) return None{};
    const auto& [op, name] = std::get<OpField>(source);
    if (row(op).has_parameter(name)) return parameter(producer, op, name, step, code);
    const auto attribute = plan_.ops[op].attributes.find(name);
    if (attribute != plan_.ops[op].attributes.end()) return attribute->second;
    if (row(op).has_slot(name)) return Value{Kind::Slot, op, name};
    return None{};
  }

  Argument input(int op, const Step& step, std::vector<Instruction>& code) {
    if (state(op) == State::Computed) return compute(op, step, code);
    const Value* const kept = kept_slot(op);
    return kept != nullptr ? *kept : added_slot(op);
  }

  bool has_product(const Producer& producer) const {
    return std::ranges::any_of(producer.ops, [&](int op) { return is_product(op); });
  }

  // A parameter, or all tensors of a list; none if it is optional and None.
  Argument parameter(const Producer& producer, int op, const std::string& name, const Step& step,
                     std::vector<Instruction>& code) const {
    ValueList found;
    for (const std::string& tensor : analysis_.tensors_of(op, name)) {
      if (!analysis_.has_parameter(op, tensor)) continue;
      const Value parameter{Kind::Parameter, op, tensor};
      if (!analysis_.parameter_format(op, tensor).is_exact()) {
        code.push_back(decode_again(analysis_, parameter, gradient(step)));
        found.emplace_back(Value{Kind::Temporary, op, tensor});
      } else {
        found.push_back(has_product(producer) ? cast_parameter(parameter, code) : parameter);
      }
    }
    if (found.empty()) return None{};
    return row(op).list_of(name) != nullptr ? Argument(found) : Argument(found[0]);
  }

  // A parameter in the dtype that its op reads. Only products need that of their input.
  Value cast_parameter(const Value& parameter, std::vector<Instruction>& code) const {
    const int op = parameter.op;
    const int k = position_of(analysis_.ops()[op].parameters, parameter.name);
    const bool is_read = analysis_.parameters(op)[k].dtype == input_dtype(op);
    if (is_read || analysis_.keeps_dtype(op, parameter.name)) return parameter;
    const Value cast{Kind::Temporary, op, parameter.name};
    code.push_back(make_cast(parameter, input_dtype(op), cast));
    return cast;
  }

  static Value gradient(const Step& step) { return {Kind::Grad, step.last() + 1}; }

  Plan& plan_;
  const Analysis& analysis_;
  const std::vector<StepGroup>& groups_;  // of forward
  const std::vector<DType>& dtypes_;      // those of the main tensor, by boundary
  Recompute policy_;
  std::vector<std::optional<DType>> casts_;  // the dtype to which the step that covers an op casts
                                             // the main tensor
  std::set<Value> saved_;                    // by native steps of forward
  std::set<Value> read_;
  std::map<int, std::vector<Value>> main_slots_;  // by boundary
  std::map<int, State> states_;                   // by boundary
  std::map<int, Producer> producers_;             // by boundary that can be recomputed
  std::set<int> written_;                         // boundaries that an earlier step recomputes
  std::set<Value> replaced_;
};

}  // namespace

void recompute_outputs(Plan& plan, const Analysis& analysis,
                       const std::vector<StepGroup>& forward) {
  Recomputation(plan, analysis, forward).run();
}

bool has_field(const OpDeclaration& op, const std::string& name) {
  return op.has_parameter(name) || op.has_slot(name) || op.has_extra_input(name) ||
         op.has_attribute(name);
}

bool asks_for_recompute(const Attributes& attributes) {
  const auto found = attributes.find("activation_recompute_in_mlp");
  return found != attributes.end() && std::get<bool>(found->second);
}

}  // namespace transformer_ops
