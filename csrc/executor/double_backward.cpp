#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <set>

#include "executor/plan_function.h"
#include "executor/run.h"
#include "executor/unfused.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::variable_list;
using Kind = Value::Kind;

// Returns the values of one tensor with the history of another.
class Substitute : public torch::autograd::Function<Substitute> {
 public:
  static Tensor forward(AutogradContext*, const Tensor&, const Tensor& values) {
    return values.detach().clone();
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {grads[0], Tensor()};
  }
};

class Rerun {
 public:
  Rerun(const Program& program, const Tensors& saved) : program_(program), saved_(saved) {
    const auto current = torch::autograd::get_current_node();
    node_ = dynamic_cast<CppNode<PlanFunction>*>(current.get());
    TORCH_CHECK(node_ != nullptr, "[double_backward] must run in the plan's own autograd node");
    unfused_ = unfused_program_for(program, connect_inputs());
    frame_.values.resize(unfused_->forward.values);
    frame_.metadata.resize(unfused_->metadata);
    for (size_t i = 0; i < inputs_.size(); ++i) frame_.values[unfused_->inputs[i]] = inputs_[i];
  }

  // The node's outputs as a differentiable function of `inputs()`.
  Tensors run() {
    const int count = unfused_->plan.size();
    for (int op = 0; op < count; ++op) run_op(op);
    Tensors outputs = {frame_.values[unfused_->outputs[0]]};
    for (size_t i = 1 + program_.constants; i < unfused_->outputs.size(); ++i) {
      outputs.push_back(frame_.values[unfused_->outputs[i]]);
    }
    return outputs;
  }

  const Tensors& inputs() const { return inputs_; }

 private:
  at::TensorList connect_inputs() {
    std::vector<Value> names = {{Kind::Main, 0}};
    std::ranges::copy(program_.plan.extra_inputs, std::back_inserter(names));
    std::ranges::copy(program_.plan.parameters, std::back_inserter(names));
    for (size_t i = 0; i < names.size(); ++i) {
      const Tensor saved = saved_input(i);
      inputs_.push_back(connect(saved, i));
      if (saved.defined()) known_.insert(names[i]);
    }
    return inputs_;
  }

  // The tensor itself if it was saved, else undefined.
  Tensor saved_input(size_t i) const {
    const auto row = std::ranges::find(program_.saved, program_.inputs[i]);
    return row == program_.saved.end() ? Tensor() : saved_[row - program_.saved.begin()];
  }

  // A view of the input, so that the inner gradient stops here. If it was not saved, zeros of its
  // shape are connected to the graph instead.
  Tensor connect(Tensor tensor, size_t i) const {
    if (!tensor.defined()) {
      const auto& info = node_->input_info_[i];
      tensor = at::zeros_symint(info.size, at::TensorOptions(info.scalar_type).device(info.device));
      const auto& edge = node_->next_edge(static_cast<uint32_t>(i));
      if (edge.is_valid()) torch::autograd::impl::set_gradient_edge(tensor, edge);
    }
    return tensor.view_as(tensor);
  }

  Tensor saved_slot(int op, const std::string& name) const {
    const auto row = program_.saved_slots.find({Kind::Slot, op, name});
    return row == program_.saved_slots.end() ? Tensor() : saved_[row->second];
  }

  void run_op(int op) {
    const PlannedOp& planned = unfused_->plan.ops[op];
    Tensor& input = frame_.values[unfused_->boundaries[op]];
    const Tensor known = saved_slot(op, "input");
    if (known.defined()) known_.insert({Kind::Main, op});
    if (gives_known_values(op)) known_.insert({Kind::Main, op + 1});
    if (known.defined() && op > 0) {
      input = Substitute::apply(input.to(known.scalar_type()), known);
    }
    substitute_extra_inputs(op);
    const auto& replay = find_replay(planned.kind);
    if (replay && (!known.defined() || gives_integers(op) || draws(planned))) {
      const ReplayCall call{
          .input = input,
          .slot = [&](const std::string& name) { return saved_slot(op, name); },
          .output = saved_output(op),
          .attributes = planned.attributes,
          .tensors = [&](const std::string& name) { return tensors(op, name); },
          .give = [&](const std::string& name, Tensor value) { *result(op, name) = value; }};
      if (const Tensor output = replay(call); output.defined()) {
        frame_.values[unfused_->boundaries[op + 1]] = output;
        if (known_.contains({Kind::Main, op})) known_.insert({Kind::Main, op + 1});
        return;
      }
    }
    const bool matters = op >= program_.plan.first_backward;
    if (matters && !known.defined() && !known_.contains({Kind::Main, op})) check_linear(planned);
    interpret_step(*unfused_, unfused_->forward, op, frame_);
  }

  // Replaces the placeholder values of extra inputs by the saved ones.
  void substitute_extra_inputs(int op) {
    for (const std::string& name : unfused_->plan.ops[op].extra_inputs) {
      const Tensor known = saved_slot(op, name);
      Tensor* const value = known.defined() ? argument(op, name) : nullptr;
      if (value == nullptr) continue;
      const bool is_floating = at::isFloatingType(known.scalar_type());
      *value = is_floating && value->defined() ? Substitute::apply(*value, known) : known;
    }
  }

  // Does the op draw random numbers? A second run would draw others.
  static bool draws(const PlannedOp& planned) {
    const TypedOp* const forward = find_typed_op(declaration(planned.kind).forward_schema.name);
    return forward != nullptr && forward->random;
  }

  // Does the op return integers, such as chosen experts? They may not have been saved.
  bool gives_integers(int op) const {
    const PlannedOp& planned = unfused_->plan.ops[op];
    const OpDeclaration& row = declaration(planned.kind);
    return std::ranges::any_of(planned.extra_outputs,
                               [&](const std::string& name) { return row.is_integer(name); });
  }

  // The call of a typed op in the plan without fusions.
  const Program::Call& call_of(int op) const {
    const auto& lines = unfused_->forward.lines;
    const auto line = std::ranges::find_if(lines, [&](const Program::Line& each) {
      return each.op == op && std::holds_alternative<Program::Call>(each.what);
    });
    return std::get<Program::Call>(line->what);
  }

  // The value of an argument or result by its name in the schema; null for None.
  const Program::Operand& operand_of(int op, const std::string& name) const {
    const auto& fields = declaration(unfused_->plan.ops[op].kind).forward_schema.arguments;
    const auto field = std::ranges::find(fields, name, &Schema::Field::name);
    return call_of(op).operands[field - fields.begin()];
  }
  Tensor* argument(int op, const std::string& name) {
    const auto* const load = std::get_if<Program::Load>(&operand_of(op, name));
    return load != nullptr ? &frame_.values[load->value] : nullptr;
  }
  Tensors tensors(int op, const std::string& name) {
    Tensors found;
    const Program::Operand& operand = operand_of(op, name);
    if (const auto* const load = std::get_if<Program::Load>(&operand)) {
      found.push_back(frame_.values[load->value]);
    } else if (const auto* const list = std::get_if<Program::LoadList>(&operand)) {
      for (const auto& each : *list) found.push_back(frame_.values[each.value]);
    }
    return found;
  }
  Tensor* result(int op, const std::string& name) {
    const auto& fields = declaration(unfused_->plan.ops[op].kind).forward_schema.results;
    const auto field = std::ranges::find(fields, name, &Schema::Field::name);
    return &frame_.values[call_of(op).results[field - fields.begin()]];
  }

  // The output of an op, if it was saved as the input of the next op that does not just pass it
  // through.
  Tensor saved_output(int op) const {
    const auto& boundaries = unfused_->boundaries;
    int next = op + 1;
    while (next < unfused_->plan.size() && boundaries[next + 1] == boundaries[next]) ++next;
    return next < unfused_->plan.size() ? saved_slot(next, "input") : Tensor();
  }

  // Does the op compute the values of the first forward from the values that it is given?
  bool gives_known_values(int op) const {
    const Plan& plan = unfused_->plan;
    const auto is_known = [&](const Value& value) {
      return value.op != op || known_.contains(value);
    };
    return known_.contains({Kind::Main, op}) && std::ranges::all_of(plan.parameters, is_known) &&
           std::ranges::all_of(plan.extra_inputs, is_known) &&
           std::ranges::none_of(plan.routes,
                                [&](const Route& route) { return route.input.op == op; });
  }

  // Zeros are correct only if the derivative does not depend on the input.
  static void check_linear(const PlannedOp& planned) {
    const OpDeclaration& row = declaration(planned.kind);
    for (const Slot& slot : row.slots) {
      const bool depends = slot.needed_for.empty() && !row.has_extra_input(slot.name);
      TORCH_CHECK_NOT_IMPLEMENTED(
          !depends, "[", planned.kind,
          "] double backward must have its input, which this plan did not save");
    }
  }

  const Program& program_;
  const Tensors& saved_;
  CppNode<PlanFunction>* node_;
  SharedProgram unfused_;
  Tensors inputs_;
  Frame frame_{.is_decomposed = true};
  std::set<Value> known_;  // values that are correct, not only their derivatives
};

}  // namespace

Tensors double_backward(const Program& program, const Tensors& saved, const Tensors& grads,
                        const std::vector<bool>& asked) {
  refuse_host_steps(program,
                    "create_graph=True must have native ops only: Python steps have no "
                    "second derivative");
  TORCH_CHECK(!program.accumulates, "[BasicLinear] create_graph=True must find no weight that ",
              "accumulates into main_grad or whose gradient is delayed, got one");
  refuse_saved_codes(program, "second derivatives");
  Rerun replay(program, saved);
  const Tensors outputs = replay.run();
  Tensors wanted, differentiable, given;
  const Tensors& inputs = replay.inputs();
  const auto is_wanted = [&](size_t i) {
    return inputs[i].requires_grad() && (asked.empty() || asked[i]);
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_wanted(i)) wanted.push_back(inputs[i]);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad() || !grads[i].defined()) continue;
    differentiable.push_back(outputs[i]);
    given.push_back(grads[i]);
  }
  const Tensors found = torch::autograd::grad(differentiable, wanted, given, /*retain_graph=*/true,
                                              /*create_graph=*/true, /*allow_unused=*/true);
  Tensors results;
  auto next = found.begin();
  for (size_t i = 0; i < inputs.size(); ++i) results.push_back(is_wanted(i) ? *next++ : Tensor());
  return results;
}

}  // namespace transformer_ops
