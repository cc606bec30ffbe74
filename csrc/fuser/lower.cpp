// Groups of ops -> steps with instructions. Backward is lowered first: what it reads is what
// forward saves.
#include <algorithm>
#include <set>

#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/planner.h"
#include "fuser/recompute.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

const Schema kHandOver;

class Lowering {
 public:
  explicit Lowering(const Analysis& analysis)
      : analysis_(analysis), ops_(analysis.ops()), key_(analysis.key()) {
    plan_.autocast = key_.autocast;
    plan_.first_backward = analysis.first_backward();
    list_values();
    list_gradients();
  }

  Plan run(const Rewritten& groups) {
    for (const StepGroup& group : groups.backward) plan_.backward.push_back(lower_backward(group));
    for (const StepGroup& group : groups.forward) plan_.forward.push_back(lower_forward(group));
    if (key_.recompute) recompute_cheap_outputs(plan_, dtypes());
    return std::move(plan_);
  }

 private:
  // ---- what is known before any group

  void list_values() {
    for (int i = 0; i < size(); ++i) {
      const OpNode& op = ops_[i];
      plan_.ops.push_back({op.kind, op.attributes, op.native, key_.training[i]});
      for (int k = 0; k < op.extra_inputs; ++k) {
        const Value input{Kind::ExtraInput, i, std::to_string(k)};
        if (const auto& source = op.sources[k]) {
          plan_.routes.push_back({input, extra_output(source->op, source->output)});
        } else {
          plan_.extra_inputs.push_back(input);
        }
      }
      for (int k = 0; k < op.extra_outputs; ++k) {
        if (op.visible[k]) plan_.extra_outputs.push_back(extra_output(i, k));
      }
      for (int k = 0; k < op.parameters; ++k) plan_.parameters.push_back(parameter(i, k));
    }
  }

  void list_gradients() {
    if (analysis_.needs_grad(0)) plan_.gradients.push_back({Kind::Grad, 0});
    for (size_t i = 0; i < plan_.extra_inputs.size(); ++i) {
      const Value& input = plan_.extra_inputs[i];
      if (!key_.grad_enabled || !key_.tensors[1 + i].requires_grad) continue;
      plan_.gradients.push_back({Kind::ExtraInputGrad, input.op, input.name});
    }
    for (int i = 0; i < size(); ++i) {
      for (int k = 0; k < ops_[i].parameters; ++k) {
        if (!analysis_.parameter_requires_grad(i, k)) continue;
        plan_.gradients.push_back({Kind::ParameterGrad, i, parameter(i, k).name});
      }
    }
  }

  // Does anybody want the gradient of this op's "input" or parameter?
  bool wants(int op, const std::string& target) const {
    return target == "input" ? analysis_.needs_grad(op)
                             : analysis_.parameter_requires_grad(op, target);
  }

  int size() const { return analysis_.size(); }
  const std::vector<DType>& dtypes() const { return analysis_.dtypes(); }

  static Value extra_output(int op, int k) { return {Kind::ExtraOutput, op, std::to_string(k)}; }

  Value parameter(int op, int k) const {
    const bool native = ops_[op].native;
    return {Kind::Parameter, op,
            native ? declaration(ops_[op].kind).parameters[k] : std::to_string(k)};
  }

  Value extra_input(int op, int k) const {
    if (const auto& source = ops_[op].sources[k]) return extra_output(source->op, source->output);
    return {Kind::ExtraInput, op, std::to_string(k)};
  }

  Value extra_input_grad(int op, int k) const { return gradient_of(extra_input(op, k)); }

  // ---- binding schema fields by name

  struct Span {
    const StepGroup& group;
    Bindings bindings;
    int first;
    int last;
    std::vector<int> ops;  // those that take part: all but the idle ones that a rule passed over
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

  // Is there an optional op that did not match?
  static bool lacks_an_op(const Span& span) {
    return std::ranges::find(span.group.places, -1) != span.group.places.end();
  }

  int op_with_slot(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) {
      return std::ranges::find(row.slots, name, &Slot::name) != row.slots.end();
    });
  }

  int op_with_parameter(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) {
      return std::ranges::find(row.parameters, name) != row.parameters.end();
    });
  }

  int op_with_attribute(const Span& span, const std::string& name) const {
    return find_op(span, [&](const OpDeclaration& row) {
      return std::ranges::find(row.attributes, name) != row.attributes.end();
    });
  }

  int op_with_extra(const Span& span, int OpNode::*count) const {
    const auto op = std::ranges::find_if(span.ops, [&](int i) { return ops_[i].*count > 0; });
    if (op != span.ops.end()) return *op;
    check(lacks_an_op(span), "[plan] '", span.group.name,
          "' must cover an op with an extra tensor");
    return -1;
  }

  // For an argument of an op that is absent.
  None absent(const Span& span, const Schema::Field& field) const {
    check(lacks_an_op(span) && field.type == "Tensor?", "[plan] '", span.group.name,
          "' must bind argument '", field.name, "'");
    return {};
  }

  static int place_of(const Span& span, const Field& field) {
    const int op = span.group.places[field.op];
    check(op >= 0, "[plan] '", span.group.name, "' must bind '", field.name,
          "' to an op it covers");
    return op;
  }

  Value bound_value(const Span& span, const Field& field) const {
    const int op = place_of(span, field);
    if (field.name == "extra_output") return extra_output(op, 0);
    const auto& row = declaration(ops_[op].kind);
    const bool is_slot = std::ranges::find(row.slots, field.name, &Slot::name) != row.slots.end();
    return {is_slot ? Kind::Slot : Kind::Parameter, op, field.name};
  }

  Argument forward_argument(const Span& span, const Schema::Field& field) const {
    const std::string& name = field.name;
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      if (const auto* constant = std::get_if<Attribute>(&bound->second)) return *constant;
      const auto& source = std::get<Field>(bound->second);
      return Value{Kind::Parameter, place_of(span, source), source.name};
    }
    if (name == "input") return Value{Kind::Main, span.first};
    if (name == "extra_input") {
      const int op = op_with_extra(span, &OpNode::extra_inputs);
      if (op < 0) return absent(span, field);
      return extra_input(op, 0);
    }
    if (name.starts_with("save_")) {
      return Attribute(needed_slots_.contains(result_value(span, name.substr(5))));
    }
    if (const int op = op_with_parameter(span, name); op >= 0) {
      return Value{Kind::Parameter, op, name};
    }
    if (const int op = op_with_attribute(span, name); op >= 0) return ops_[op].attributes.at(name);
    return absent(span, field);
  }

  Value result_value(const Span& span, const std::string& name) const {
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      return bound_value(span, std::get<Field>(bound->second));
    }
    if (name == "output") return {Kind::Main, span.last + 1};
    if (name == "extra_output") return extra_output(op_with_extra(span, &OpNode::extra_outputs), 0);
    return {Kind::Slot, span.first, name};
  }

  Argument backward_argument(const Span& span, const Schema& schema, const Schema::Field& field) {
    const std::string& name = field.name;
    if (name == "grad_output") return Value{Kind::Grad, span.last + 1};
    if (name == "grad_extra_output") {
      const int op = op_with_extra(span, &OpNode::extra_outputs);
      if (op < 0) return absent(span, field);
      return Value{Kind::ExtraOutputGrad, op, "0"};
    }
    if (name == "output_mask") return Attribute(output_mask(span, schema));
    if (name == "input_shape") return Value{Kind::Shape, span.first};
    if (const auto bound = span.bindings.find(name); bound != span.bindings.end()) {
      if (const auto* constant = std::get_if<Attribute>(&bound->second)) return *constant;
      return need(bound_value(span, std::get<Field>(bound->second)));
    }
    if (const int op = op_with_slot(span, name); op >= 0) return need({Kind::Slot, op, name});
    if (const int op = op_with_parameter(span, name); op >= 0) {
      return Value{Kind::Parameter, op, name};
    }
    if (const int op = op_with_attribute(span, name); op >= 0) return ops_[op].attributes.at(name);
    if (span.group.joint) return need({Kind::Slot, span.first, name});
    return absent(span, field);
  }

  // Notes that forward has to save the slot; none where no wanted gradient reads it.
  Argument need(const Value& slot) {
    if (slot.kind != Kind::Slot) return slot;
    const auto& slots = declaration(ops_[slot.op].kind).slots;
    const auto row = std::ranges::find(slots, slot.name, &Slot::name);
    if (row != slots.end() && !row->needed_for.empty() &&
        std::ranges::none_of(row->needed_for, [&](auto& name) { return wants(slot.op, name); })) {
      return None{};
    }
    needed_slots_.insert(slot);
    return slot;
  }

  // Takes a result that nobody wants.
  static Value unused(const Span& span) { return {Kind::Slot, span.first, "unused"}; }

  // grad_input, grad_extra_input or grad_<parameter> -> the value and whether anybody wants it.
  std::pair<Value, bool> backward_result(const Span& span, const std::string& name) const {
    if (name == "grad_input") return {{Kind::Grad, span.first}, analysis_.needs_grad(span.first)};
    if (name == "grad_extra_input") {
      const int op = op_with_extra(span, &OpNode::extra_inputs);
      if (op < 0) return {unused(span), false};
      return {extra_input_grad(op, 0), analysis_.extra_input_requires_grad(op, 0)};
    }
    std::string target = name.substr(std::string("grad_").size());
    int op = op_with_parameter(span, target);
    if (const auto bound = span.bindings.find(target); bound != span.bindings.end()) {
      const auto& field = std::get<Field>(bound->second);
      op = place_of(span, field);
      target = field.name;
    }
    if (op < 0 && lacks_an_op(span)) return {unused(span), false};
    check(op >= 0, "[plan] '", span.group.name, "' must name results grad_<parameter>, got '", name,
          "'");
    return {{Kind::ParameterGrad, op, target}, analysis_.parameter_requires_grad(op, target)};
  }

  std::vector<bool> output_mask(const Span& span, const Schema& schema) const {
    std::vector<bool> mask;
    for (const auto& field : schema.results) {
      mask.push_back(backward_result(span, field.name).second);
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
    return is_inactive(group) ? kHandOver : declaration(ops_[group.first].kind).forward_schema;
  }

  const Schema& backward_schema(const StepGroup& group) const {
    if (group.rule) return group.rule->backward_schema;
    const bool unread =
        ops_[group.first].extra_outputs > 0 && !analysis_.extra_output_is_read(group.first, 0);
    if (is_inactive(group) || unread) return kHandOver;
    return declaration(ops_[group.first].kind).backward_schema;
  }

  // The dtype the covered ops insist on; a Linear anywhere among them decides.
  std::optional<DType> compute_dtype(const Step& step) const {
    std::optional<DType> compute;
    for (const int op : step.ops) {
      const auto wanted = analysis_.required_dtype(op);
      if (wanted) compute = wanted;
    }
    return compute;
  }

  // With the gradients of the op's extra outputs: from the caller, and from ops that read them.
  DType promote_extra_grads(DType dtype, int op) const {
    for (int k = 0; k < ops_[op].extra_outputs; ++k) {
      dtype = promote(dtype, dtypes()[op]);
      for (const int reader : analysis_.readers(op, k)) {
        dtype = promote(dtype, dtypes()[reader + 1]);
      }
    }
    return dtype;
  }

  bool must_cast_parameters(const Step& step, DType compute) const {
    return std::ranges::any_of(step.ops, [&](int op) {
      if (!ops_[op].native || declaration(ops_[op].kind).dtype != DTypeRule::Parameter)
        return false;
      return std::ranges::any_of(step.ops, [&](int other) {
        return std::ranges::any_of(analysis_.parameters(other),
                                   [&](const auto& row) { return row.dtype != compute; });
      });
    });
  }

  void add_forward_casts(Step& step) const {
    const auto compute = compute_dtype(step);
    if (!compute) return;
    step.cast_parameters = must_cast_parameters(step, *compute);
    if (step.cast_parameters || dtypes()[step.first()] != *compute) step.compute = compute;
  }

  void add_backward_casts(Step& step) const {
    const auto compute = compute_dtype(step);
    step.cast_parameters = compute && must_cast_parameters(step, *compute);
    if (step.cast_parameters) step.compute = compute;
    DType produced = compute.value_or(dtypes()[step.last() + 1]);
    // Alone, such an op returns its main gradient's dtype; a fused one adds before it rounds.
    if (step.ops.size() > 1) {
      for (const int op : step.ops) produced = promote_extra_grads(produced, op);
    }
    const DType wanted = dtypes()[step.first()];
    if (wanted != DType::Unknown && produced != wanted) step.result = wanted;
  }

  Step lower_backward(const StepGroup& group) {
    Step step = make_step(group);
    step.skipped = step.last() < plan_.first_backward;
    if (step.skipped) return step;
    if (step.python) {
      need_all_slots(step);
      return step;
    }
    add_backward_casts(step);
    const Span span = make_span(group);
    const Schema& schema = backward_schema(group);
    if (!schema.has_result("grad_input")) step.instructions.push_back(backward_hand_over(step));
    if (schema.empty()) return step;
    Instruction call{.target = schema.name};
    bool wanted = false;
    for (const auto& field : schema.results) {
      const auto [value, is_wanted] = backward_result(span, field.name);
      call.results.push_back(is_wanted ? value : unused(span));
      wanted |= is_wanted;
    }
    if (!wanted) return step;
    for (const auto& field : schema.arguments) {
      call.arguments.push_back(backward_argument(span, schema, field));
    }
    step.instructions.push_back(std::move(call));
    return step;
  }

  Instruction backward_hand_over(const Step& step) const {
    Instruction instruction{.arguments = {Value{Kind::Grad, step.last() + 1}},
                            .results = {{Kind::Grad, step.first()}}};
    for (const int op : step.ops) {
      for (int k = 0; k < ops_[op].extra_inputs; ++k) {
        instruction.results.push_back(extra_input_grad(op, k));
      }
    }
    return instruction;
  }

  // A Python step may read every slot of the native ops it covers.
  void need_all_slots(const Step& step) {
    for (const int op : step.ops) {
      if (!ops_[op].native) continue;
      for (const Slot& slot : declaration(ops_[op].kind).slots) need({Kind::Slot, op, slot.name});
    }
  }

  Step lower_forward(const StepGroup& group) {
    Step step = make_step(group);
    if (step.python) return step;
    add_forward_casts(step);
    const Span span = make_span(group);
    const Schema& schema = forward_schema(group);
    Instruction call{.target = schema.name};
    if (schema.empty()) {
      call.arguments = {Value{Kind::Main, span.first}};
      call.results = {{Kind::Main, span.last + 1}};
      for (int k = 0; k < ops_[span.first].extra_outputs; ++k) {
        call.results.push_back(extra_output(span.first, k));
      }
    } else {
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
    for (const Value& slot : needed_slots_) {
      if (slot.op < span.first || slot.op > span.last) continue;
      if (const auto source = slot_source(span, call, slot)) step.saves.push_back({slot, *source});
    }
  }

  // Where forward finds a slot; none leaves the slot unsaved, which verify() reports.
  std::optional<Value> slot_source(const Span& span, const Instruction& call,
                                   const Value& slot) const {
    if (std::ranges::find(call.results, slot) != call.results.end()) return slot;
    const auto& parameters = declaration(ops_[slot.op].kind).parameters;
    if (std::ranges::find(parameters, slot.name) != parameters.end()) {
      return Value{Kind::Parameter, slot.op, slot.name};
    }
    if (slot.name == "input" && slot.op == span.first) return Value{Kind::Main, span.first};
    if (slot.name == "input") {
      // The op before may have handed the very same tensor out.
      int before = slot.op - 1;
      while (before > span.first && analysis_.is_idle(before)) --before;
      const Value twin = extra_output(before, 0);
      const bool hands_on = declaration(ops_[before].kind).forward_schema.empty();
      if (hands_on && std::ranges::find(call.results, twin) != call.results.end()) return twin;
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
