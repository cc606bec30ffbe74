// Lowers groups of ops to steps with instructions. Backward is lowered first, because forward saves
// what backward reads.
#include <algorithm>
#include <array>
#include <set>

#include "fuser/casts.h"
#include "fuser/compress.h"
#include "fuser/declaration.h"
#include "fuser/delay.h"
#include "fuser/error.h"
#include "fuser/planner.h"
#include "fuser/quantize.h"
#include "fuser/recompute.h"
#include "fuser/round_results.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

const Schema kHandOver;

// The rest of a schema field's name after a prefix.
std::optional<std::string> suffix(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  return name.substr(prefix.size());
}

class Lowering {
 public:
  explicit Lowering(const Analysis& analysis)
      : analysis_(analysis), ops_(analysis.ops()), key_(analysis.key()) {
    plan_.autocast = key_.autocast;
    plan_.recipe = key_.recipe;
    plan_.saved = key_.policies.saved;
    plan_.first_backward = analysis.first_backward();
    list_values();
    list_gradients();
  }

  Plan run(const Rewritten& groups) {
    for (const StepGroup& group : groups.backward) plan_.backward.push_back(backward_step(group));
    for (const StepGroup& group : groups.forward) {
      Step& step = plan_.forward.emplace_back(lower_forward(group));
      if (step.python) continue;
      decode_parameters(analysis_, Pass::Forward, step);
      add_forward_casts(analysis_, step);
      quantize_forward(analysis_, step);
    }
    list_states(plan_);
    recompute_outputs(plan_, analysis_, groups.forward);
    for (size_t k = 0; k < groups.forward.size(); ++k) {
      if (!plan_.forward[k].python) stop_saving(groups.forward[k], plan_.forward[k]);
    }
    compress_saved(plan_, dtypes());
    // Only the CPU has kernels that round in the same pass.
    if (key_.recipe != nullptr && key_.device == Device::Cpu && !key_.decomposed) {
      round_results(plan_, dtypes());
    }
    return std::move(plan_);
  }

 private:
  // ---- what is known before any group is lowered

  void list_values() {
    for (int i = 0; i < size(); ++i) {
      const OpNode& op = ops_[i];
      plan_.ops.push_back(
          {op.kind, op.attributes, op.native, key_.training[i], op.extra_inputs, op.extra_outputs});
      for (int k = 0; k < std::ssize(op.extra_inputs); ++k) {
        const Value input{Kind::ExtraInput, i, op.extra_inputs[k]};
        if (op.sources[k]) {
          plan_.routes.push_back({input, extra_input(i, k)});
        } else if (analysis_.has_extra_input(i, k)) {
          plan_.extra_inputs.push_back(input);
        }
      }
      for (int k = 0; k < std::ssize(op.extra_outputs); ++k) {
        if (op.visible[k]) plan_.extra_outputs.push_back(extra_output(i, k));
      }
      for (const std::string& name : op.parameters) {
        if (!analysis_.has_parameter(i, name)) continue;
        plan_.parameters.push_back({Kind::Parameter, i, name});
        if (analysis_.parameter_format(i, name).is_exact()) continue;
        plan_.parameters.push_back({Kind::Parameter, i, name, Value::Part::Codes});
        plan_.parameters.push_back({Kind::Parameter, i, name, Value::Part::Scale});
      }
    }
  }

  void list_gradients() {
    if (analysis_.needs_grad(0)) plan_.gradients.push_back({Kind::Grad, 0});
    for (const Value& input : plan_.extra_inputs) {
      const int k = position_of(ops_[input.op].extra_inputs, input.name);
      if (!analysis_.extra_input_requires_grad(input.op, k)) continue;
      plan_.gradients.push_back(gradient_of(input));
    }
    for (const Value& parameter : plan_.whole_parameters()) {
      if (!analysis_.parameter_requires_grad(parameter.op, parameter.name)) continue;
      plan_.gradients.push_back(gradient_of(parameter));
    }
  }

  // Is the gradient of this op's "input", parameter or extra input wanted?
  bool wants(int op, const std::string& target) const {
    if (target == "input") return analysis_.needs_grad(op);
    const int extra = position_of(ops_[op].extra_inputs, target);
    return extra < 0 ? analysis_.parameter_requires_grad(op, target)
                     : analysis_.extra_input_requires_grad(op, extra);
  }

  int size() const { return analysis_.size(); }
  const std::vector<DType>& dtypes() const { return analysis_.dtypes(); }

  Value extra_output(int op, int k) const {
    return {Kind::ExtraOutput, op, ops_[op].extra_outputs[k]};
  }

  // The value that an extra input reads.
  Value extra_input(int op, int k) const {
    if (const auto& source = ops_[op].sources[k]) return extra_output(source->op, source->output);
    return {Kind::ExtraInput, op, ops_[op].extra_inputs[k]};
  }

  // The tensor or list that the op reads by this name; none if it is optional and None.
  Argument tensor(int op, const std::string& name) const {
    const int extra = position_of(ops_[op].extra_inputs, name);
    const bool is_there =
        extra < 0 ? analysis_.has_parameter(op, name) : analysis_.has_extra_input(op, extra);
    if (!is_there) return None{};
    return extra < 0 ? whole({Kind::Parameter, op, name}) : extra_input(op, extra);
  }

  // The value itself, or all values of a listed parameter.
  Argument whole(const Value& value) const {
    const OpNode& op = ops_[value.op];
    const bool is_list = op.native && declaration(op.kind).list_of(value.name) != nullptr;
    if (!is_list) return value;
    ValueList list;
    for (const std::string& name : analysis_.tensors_of(value.op, value.name)) {
      list.push_back({value.kind, value.op, name});
    }
    return list;
  }

  // ---- binding schema fields by name

  struct Span {
    const StepGroup& group;
    Bindings bindings;
    int first;
    int last;
    std::vector<int> ops;  // the ops without the idle ones that a rule skipped
  };

  Span make_span(const StepGroup& group) const {
    Span span{group, {}, group.first, group.first + group.count - 1, group.places};
    std::erase(span.ops, -1);
    if (!group.rule) span.ops = {group.first};
    if (group.rule && group.rule->bind) span.bindings = group.rule->bind({analysis_, group.places});
    return span;
  }

  // The first covered op whose declaration lists `name`, or -1.
  template <typename Has>
  int find_op(const Span& span, Has&& has) const {
    for (const int op : span.ops) {
      if (has(declaration(ops_[op].kind))) return op;
    }
    return -1;
  }

  int op_with_slot(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) { return row.has_slot(name); });
  }

  int op_with_parameter(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) { return row.has_parameter(name); });
  }

  // The op that has such a parameter or extra input.
  int op_with_tensor(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) {
      return row.has_parameter(name) || row.has_extra_input(name);
    });
  }

  int op_with_extra_output(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) { return row.has_extra_output(name); });
  }

  int op_with_attribute(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) {
      return row.has_attribute(name) || row.has_flag(name);
    });
  }

  Argument attribute(int op, const std::string& name) const {
    const auto found = ops_[op].attributes.find(name);
    if (found != ops_[op].attributes.end()) return found->second;
    if (declaration(ops_[op].kind).has_flag(name)) return Attribute(false);
    return None{};
  }

  // The value for an argument of an absent op.
  None absent(const Span& span, const Schema::Field& field) const {
    check(span.group.lacks_an_op() && field.type == "Tensor?", "[plan] '", span.group.name,
          "' must bind argument '", field.name, "'");
    return {};
  }

  static int place_of(const Span& span, const Field& field) {
    const int op = span.group.place(field.op);
    check(op >= 0, "[plan] '", span.group.name, "' must bind '", field.name,
          "' to an op it covers, got entry ", field.op);
    return op;
  }

  Value bound_value(const Span& span, const Field& field) const {
    const int op = place_of(span, field);
    const auto& row = declaration(ops_[op].kind);
    if (row.has_extra_output(field.name)) return {Kind::ExtraOutput, op, field.name};
    // Forward can save the input of any op, also if its own backward does not read it.
    const bool is_slot = field.name == "input" || row.has_slot(field.name);
    return {is_slot ? Kind::Slot : Kind::Parameter, op, field.name};
  }

  // Is the op that has this argument in training mode?
  Attribute training(const Span& span) const {
    const int op = find_op(
        span, [](const OpDeclaration& row) { return row.forward_schema.has_argument(kTraining); });
    check(op >= 0, "[plan] '", span.group.name, "' must cover an op with a training flag");
    return Attribute(static_cast<bool>(key_.training[op]));
  }

  Argument forward_argument(const Span& span, const Schema::Field& field) const {
    const std::string& name = field.name;
    if (name == "input") return Value{Kind::Main, span.first};
    if (name == kTraining) return training(span);
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      if (const auto* constant = std::get_if<Attribute>(&bound->second)) return *constant;
      const auto& source = std::get<Field>(bound->second);
      return tensor(place_of(span, source), source.name);
    }
    if (const auto slot = suffix(name, "save_")) {
      return Attribute(needed_slots_.contains(result_value(span, *slot)));
    }
    if (const int op = op_with_tensor(span, name); op >= 0) return tensor(op, name);
    if (const int op = op_with_attribute(span, name); op >= 0) return attribute(op, name);
    return absent(span, field);
  }

  Value result_value(const Span& span, const std::string& name) const {
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      return bound_value(span, std::get<Field>(bound->second));
    }
    if (name == "output") return {Kind::Main, span.last + 1};
    if (const int op = op_with_extra_output(span, name); op >= 0) {
      return {Kind::ExtraOutput, op, name};
    }
    return {Kind::Slot, span.first, name};
  }

  Argument backward_argument(const Span& span, const Schema& schema, const Schema::Field& field) {
    const std::string& name = field.name;
    if (name == "grad_output") return Value{Kind::Grad, span.last + 1};
    if (const auto output = suffix(name, "grad_")) {
      const int op = op_with_extra_output(span, *output);
      if (op < 0) return absent(span, field);
      const int k = position_of(ops_[op].extra_outputs, *output);
      if (!analysis_.extra_output_is_read(op, k)) return None{};
      return Value{Kind::ExtraOutputGrad, op, *output};
    }
    if (name == "output_mask") return Attribute(output_mask(span, schema));
    if (name == kTraining) return training(span);
    if (name == "input_shape") return Value{Kind::Shape, span.first};
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      if (const auto* constant = std::get_if<Attribute>(&bound->second)) return *constant;
      return need(bound_value(span, std::get<Field>(bound->second)));
    }
    if (const int op = op_with_slot(span, name); op >= 0) return need({Kind::Slot, op, name});
    if (const int op = op_with_parameter(span, name); op >= 0) return tensor(op, name);
    if (const int op = op_with_attribute(span, name); op >= 0) return attribute(op, name);
    if (span.group.joint) return need({Kind::Slot, span.first, name});
    return absent(span, field);
  }

  // Records that forward has to save the slot; returns none if no wanted gradient reads it.
  Argument need(const Value& slot) {
    if (slot.kind != Kind::Slot) return whole(slot);
    if (is_absent(slot)) return None{};
    const auto& slots = declaration(ops_[slot.op].kind).slots;
    const auto row = std::ranges::find(slots, slot.name, &Slot::name);
    if (row != slots.end() && !row->is_read_with(ops_[slot.op].attributes)) return None{};
    if (row != slots.end() && !row->needed_for.empty() &&
        std::ranges::none_of(row->needed_for, [&](auto& name) { return wants(slot.op, name); })) {
      return None{};
    }
    std::array<Argument, 1> found = {whole(slot)};
    for_each_value(found, [&](const Value& value) { needed_slots_.insert(value); });
    return found[0];
  }

  // Does the slot save an optional tensor that is None?
  bool is_absent(const Value& slot) const {
    const OpDeclaration& row = declaration(ops_[slot.op].kind);
    if (!row.has_parameter(slot.name) && !row.has_extra_input(slot.name)) return false;
    return std::holds_alternative<None>(tensor(slot.op, slot.name));
  }

  // A value for a result that is not wanted.
  static Value unused(const Span& span) { return {Kind::Temporary, span.first, "unused"}; }
  static Result unused(const Span& span, const Schema::Field& field) {
    return field.type == "Tensor[]" ? Result(ValueList()) : Result(unused(span));
  }

  // Maps grad_<input, parameter or extra input> to its value, or to the state that it is added to,
  // and says whether it is wanted.
  std::pair<Result, bool> backward_result(const Span& span, const Schema::Field& field) const {
    const std::string& name = field.name;
    if (name == "grad_input") {
      return {Value{Kind::Grad, span.first}, analysis_.needs_grad(span.first)};
    }
    std::string target = suffix(name, "grad_").value_or(name);
    int op = op_with_tensor(span, target);
    if (const auto bound = span.bindings.find(target); bound != span.bindings.end()) {
      const auto& source = std::get<Field>(bound->second);
      op = place_of(span, source);
      target = source.name;
    }
    if (op < 0 && span.group.lacks_an_op()) return {unused(span, field), false};
    check(
        op >= 0, "[plan] '", span.group.name,
        "' must name results grad_<parameter or extra input>, or bind their names by .bind, got '",
        name, "'");
    const Argument found = tensor(op, target);
    if (std::holds_alternative<None>(found) || !wants(op, target)) {
      return {unused(span, field), false};
    }
    if (const auto* const value = std::get_if<Value>(&found)) {
      return {plan_.result_of(gradient_of(*value)), true};
    }
    ValueList gradients;
    for (const Value& value : std::get<ValueList>(found)) {
      const bool is_wanted = wants(op, value.name);
      gradients.push_back(is_wanted ? plan_.result_of(gradient_of(value)) : unused(span));
    }
    return {std::move(gradients), true};
  }

  std::vector<bool> output_mask(const Span& span, const Schema& schema) const {
    std::vector<bool> mask;
    for (const auto& field : schema.results) {
      mask.push_back(backward_result(span, field).second);
    }
    return mask;
  }

  // ---- steps

  Step make_step(const StepGroup& group) const {
    Step step{.name = group.name, .python = group.python, .joint = group.joint};
    for (int k = 0; k < group.count; ++k) step.ops.push_back(group.first + k);
    return step;
  }

  bool is_inactive(const StepGroup& group) const {
    return !group.rule && group.count == 1 && analysis_.is_idle(group.first);
  }

  const Schema& forward_schema(const StepGroup& group) const {
    if (group.rule) return group.rule->forward_schema;
    const OpDeclaration& row = declaration(ops_[group.first].kind);
    const bool hands_on = is_inactive(group) || (row.hands_on && !key_.decomposed);
    return hands_on ? kHandOver : row.forward_schema;
  }

  const Schema& backward_schema(const StepGroup& group) const {
    if (group.rule) return group.rule->backward_schema;
    if (is_inactive(group) || is_unread_hand_over(group.first)) return kHandOver;
    return declaration(ops_[group.first].kind).backward_schema;
  }

  // Does the op only return its tensor as an extra output that nothing reads?
  bool is_unread_hand_over(int op) const {
    const int outputs = static_cast<int>(std::ssize(ops_[op].extra_outputs));
    if (outputs == 0 || !declaration(ops_[op].kind).forward_schema.empty()) return false;
    for (int k = 0; k < outputs; ++k) {
      if (analysis_.extra_output_is_read(op, k)) return false;
    }
    return true;
  }

  // Does each op have its own call, because its product takes rounded operands?
  bool has_calls_of_ops(const StepGroup& group) const {
    if (!group.rule || group.rule->under_recipe != UnderRecipe::EachCall) return false;
    return std::ranges::any_of(group.places,
                               [&](int op) { return op >= 0 && analysis_.is_quantized(op); });
  }

  Step backward_step(const StepGroup& group) {
    if (has_calls_of_ops(group)) {
      Step step = make_step(group);
      for (int op = step.last(); op >= step.first(); --op) {
        Step part = backward_step({.first = op, .name = ops_[op].kind});
        std::ranges::move(part.instructions, std::back_inserter(step.instructions));
      }
      return step;
    }
    Step step = lower_backward(group);
    if (step.python) return step;
    decode_parameters(analysis_, Pass::Backward, step);
    quantize_backward(analysis_, backward_schema(group), step);
    add_backward_casts(analysis_, step);
    delay_gradients(analysis_, step);
    return step;
  }

  Step lower_backward(const StepGroup& group) {
    Step step = make_step(group);
    step.skipped = step.last() < plan_.first_backward;
    if (step.skipped) return step;
    if (step.python) {
      need_all_slots(step);
      return step;
    }
    const Span span = make_span(group);
    const Schema& schema = backward_schema(group);
    if (!schema.has_result("grad_input")) {
      step.instructions.push_back(backward_hand_over(step, schema));
    }
    if (schema.empty()) return step;
    Instruction call{.target = schema.name};
    bool wanted = false;
    for (const auto& field : schema.results) {
      auto [value, is_wanted] = backward_result(span, field);
      call.results.push_back(is_wanted ? std::move(value) : unused(span, field));
      wanted |= is_wanted;
    }
    if (!wanted) return step;
    for (const auto& field : schema.arguments) {
      call.arguments.push_back(backward_argument(span, schema, field));
    }
    step.instructions.push_back(std::move(call));
    return step;
  }

  // Passes the gradient to the input, and to the extra inputs whose gradients `schema` does not
  // have.
  Instruction backward_hand_over(const Step& step, const Schema& schema) const {
    Instruction instruction{.arguments = {Value{Kind::Grad, step.last() + 1}},
                            .results = {Value{Kind::Grad, step.first()}}};
    for (const int op : step.ops) {
      for (int k = 0; k < std::ssize(ops_[op].extra_inputs); ++k) {
        if (!analysis_.has_gradient(op, k) || !analysis_.has_extra_input(op, k)) continue;
        if (schema.has_result("grad_" + ops_[op].extra_inputs[k])) continue;
        instruction.results.emplace_back(gradient_of(extra_input(op, k)));
      }
    }
    return instruction;
  }

  // A Python step may read every slot of the native ops that it covers.
  void need_all_slots(const Step& step) {
    for (const int op : step.ops) {
      if (!ops_[op].native) continue;
      for (const Slot& slot : declaration(ops_[op].kind).slots) need({Kind::Slot, op, slot.name});
    }
  }

  Step lower_forward(const StepGroup& group) {
    Step step = make_step(group);
    if (step.python) return step;
    const Span span = make_span(group);
    const Schema& schema = forward_schema(group);
    Instruction call{.target = schema.name};
    if (schema.empty()) {
      call.arguments = {Value{Kind::Main, span.first}};
      call.results = {Value{Kind::Main, span.last + 1}};
      for (int k = 0; k < std::ssize(ops_[span.first].extra_outputs); ++k) {
        call.results.push_back(extra_output(span.first, k));
      }
    } else {
      if (!schema.has_result("output")) {
        step.instructions.push_back({.arguments = {Value{Kind::Main, span.first}},
                                     .results = {Value{Kind::Main, span.last + 1}}});
      }
      for (const auto& field : schema.arguments) {
        call.arguments.push_back(forward_argument(span, field));
      }
      for (const auto& field : schema.results) {
        call.results.push_back(result_value(span, field.name));
      }
    }
    add_saves(span, call, step);
    step.instructions.push_back(std::move(call));
    return step;
  }

  void add_saves(const Span& span, const Instruction& call, Step& step) const {
    // Slots are sorted by op.
    const auto end = needed_slots_.lower_bound({Kind::Slot, span.last + 1});
    for (auto slot = needed_slots_.lower_bound({Kind::Slot, span.first}); slot != end; ++slot) {
      const auto source = slot_source(span, call, *slot);
      if (source) step.saves.push_back({*slot, *source});
    }
  }

  // Sets save_<slot> to false for slots that backward recomputes instead.
  void stop_saving(const StepGroup& group, Step& step) const {
    const Span span = make_span(group);
    const Schema& schema = forward_schema(group);
    for (size_t k = 0; k < schema.arguments.size(); ++k) {
      const auto slot = suffix(schema.arguments[k].name, "save_");
      if (!slot) continue;
      const Value value = result_value(span, *slot);
      const bool is_saved = std::ranges::find(step.saves, value, &Save::slot) != step.saves.end();
      if (is_saved || !needed_slots_.contains(value)) continue;
      for (Instruction& call : step.instructions) {
        // If a cast writes the slot, the call still has to return the tensor.
        if (call.target != kCast && call.writes(value)) call.arguments[k] = Attribute(false);
      }
    }
  }

  // The forward value of a slot. With none the slot is not saved, which verify() reports.
  std::optional<Value> slot_source(const Span& span, const Instruction& call,
                                   const Value& slot) const {
    if (call.writes(slot)) return slot;
    const OpDeclaration& row = declaration(ops_[slot.op].kind);
    if (!row.parameter_of(slot.name).empty()) return Value{Kind::Parameter, slot.op, slot.name};
    if (row.has_extra_input(slot.name)) return std::get<Value>(tensor(slot.op, slot.name));
    if (row.has_extra_output(slot.name)) return Value{Kind::ExtraOutput, slot.op, slot.name};
    if (slot.name == "input" && slot.op == span.first) return Value{Kind::Main, span.first};
    if (slot.name == "input") {
      // The op before may return the same tensor as an extra output.
      int before = slot.op - 1;
      while (before > span.first && analysis_.is_idle(before)) --before;
      const bool hands_on = declaration(ops_[before].kind).forward_schema.empty();
      if (!hands_on || ops_[before].extra_outputs.empty()) return std::nullopt;
      const Value twin = extra_output(before, 0);
      if (call.writes(twin)) return twin;
    }
    if (slot.name == "output" && slot.op == span.last) return Value{Kind::Main, span.last + 1};
    return std::nullopt;
  }

  const Analysis& analysis_;
  const std::vector<OpNode>& ops_;
  const PlanKey& key_;
  Plan plan_;
  std::set<Value> needed_slots_;
};

}  // namespace

Plan lower(const Analysis& analysis, const Rewritten& groups) {
  return Lowering(analysis).run(groups);
}

}  // namespace transformer_ops
