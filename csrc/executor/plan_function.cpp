#include "executor/plan_function.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "executor/partial_backward.h"
#include "executor/pass_ops.h"
#include "executor/saved.h"

namespace transformer_ops {
namespace {
class EarlyRelease;
}
}  // namespace transformer_ops

// Only CppNode may access what a context saves, and its release_variables() takes a lock that it
// already holds while backward runs.
template <>
struct torch::autograd::CppNode<transformer_ops::EarlyRelease> {
  static void release_variables(AutogradContext& context) {
    context.saved_variables_.clear();
    context.has_freed_buffers_ = true;
  }
};

namespace transformer_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// the inputs of the node before the tensors
constexpr size_t kFirstTensor = 1;
// the saved data of the native part of a call: its program; its id and metadata
constexpr size_t kSavedData = 2;
constexpr const char* kUpdated = "updated";
constexpr const char* kRecorded = "recorded";  // a plan in one line; such a call has no host

// Copies a gradient that shares its memory. A leaf takes a gradient without other references as its
// own and adds to it in place, but does not notice views of the same memory.
void unshare(Tensor& grad) {
  if (!grad.defined() || !grad.has_storage()) return;
  // In a trace, the reference count says nothing.
  const bool is_traced = grad.key_set().has(c10::DispatchKey::Python);
  if (!is_traced && grad.storage().use_count() > 1) grad = grad.clone();
}

// ---- what the contexts of host steps save

// A saved tensor may have any layout, because only the host reads it, but it must have memory.
void check_memory(const Plan& plan, const std::vector<Tensors>& rows) {
  for (size_t op = 0; op < plan.ops.size(); ++op) {
    for (const Tensor& tensor : rows[op]) {
      TORCH_CHECK(!tensor.defined() || !lacks_memory(tensor), "[", plan.ops[op].kind,
                  "] forward must save tensors with memory, got a tensor whose memory was freed");
    }
  }
}

// Adds these tensors to those that the node saves, each once, and records their positions.
void save_own(AutogradContext* context, const std::vector<Tensors>& rows, variable_list& saved) {
  std::vector<int64_t> positions;
  for (const Tensors& row : rows) {
    positions.push_back(static_cast<int64_t>(row.size()));
    for (const Tensor& tensor : row) {
      if (!tensor.defined()) {
        positions.push_back(-1);
        continue;
      }
      const auto same = [&](const Tensor& other) { return other.is_same(tensor); };
      const auto found = std::ranges::find_if(saved, same);
      positions.push_back(found - saved.begin());
      if (found == saved.end()) saved.push_back(tensor);
    }
  }
  context->saved_data["own"] = positions;
}

std::vector<Tensors> load_own(AutogradContext* context, const variable_list& saved) {
  const auto positions = context->saved_data["own"].toIntVector();
  std::vector<Tensors> rows;
  for (auto next = positions.begin(); next != positions.end();) {
    Tensors& row = rows.emplace_back();
    for (int64_t count = *next++; count > 0; --count, ++next) {
      row.push_back(*next < 0 ? Tensor() : saved[*next]);
    }
  }
  return rows;
}

// ---- activation checkpointing

// Is this the second run of a checkpoint? Its hook takes what forward saves.
bool runs_again() {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         at::SavedTensorDefaultHooks::get_hooks().has_value();
}

// The hook saves tensors without gradients themselves. A frozen parameter may be emptied before
// backward reads it (offloading, ZeRO-3); an alias keeps its values.
void keep_numbers(variable_list& saved) {
  for (Tensor& tensor : saved) {
    if (tensor.defined() && !tensor.requires_grad() && is_real(tensor)) {
      tensor = tensor.variable_data();
    }
  }
}

// ---- what the engine asks for

// The inputs whose gradients are wanted; empty if all are. A weight gradient that is computed later
// comes with that of the input, because it cannot be requested by name.
std::vector<bool> wanted_gradients(const AutogradContext& context, const Program& program) {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return {};
  const size_t count = program.inputs.size() - program.plan.states.size();
  const size_t tensors = 1 + program.plan.extra_inputs.size();
  std::vector<bool> wanted(count, false);
  bool all = true, any_tensor = false, has_tensor = false;
  for (size_t i = 0; i < count; ++i) {
    if (program.input_grads[i] < 0) continue;
    wanted[i] = context.needs_input_grad(i);
    all &= wanted[i];
    has_tensor |= i < tensors;
    any_tensor |= i < tensors && wanted[i];
  }
  if (all) return {};
  for (const int position : program.delayed) wanted[position] = any_tensor || !has_tensor;
  return wanted;
}

}  // namespace

Tensors run_forward(const Program& program, at::TensorList tensors, Frame& frame,
                    std::string_view recorded) {
  Tensors& values = frame.values;
  values.resize(program.forward.values);
  frame.metadata.resize(program.metadata);
  for (size_t i = 0; i < tensors.size(); ++i) values[program.inputs[i]] = tensors[i];
  if (recorded.empty() || !record_forward(recorded, program, tensors, frame)) {
    interpret(program, program.forward, frame);
  }
  Tensors outputs;
  outputs.reserve(program.outputs.size());
  for (const int index : program.outputs) {
    const Tensor& output = values[index];
    // Autograd needs a separate tensor for each output.
    const bool repeated = std::ranges::any_of(outputs, [&](auto& o) { return o.is_same(output); });
    outputs.push_back(repeated ? at::alias(output) : output);
  }
  return outputs;
}

variable_list PlanFunction::forward(AutogradContext* context, const PlanCall& call,
                                    at::TensorList) {
  const auto& [program, host, tensors, constants, recorded] = call;
  Frame frame{.host = host ? &*host : nullptr};
  const BelowAutograd below_autograd;
  Tensors outputs = run_forward(*program, tensors, frame, recorded);
  context->saved_data.reserve(kSavedData);
  context->saved_data["program"] = program.owner();
  context->saved_data["metadata"] = pack(program->id, frame.metadata);
  const auto first = outputs.begin() + 1, last = first + program->constants;
  constants.assign(std::make_move_iterator(first), std::make_move_iterator(last));
  outputs.erase(first, last);
  // Autograd handles integer outputs as it does for any function.
  for (const Tensor& output : outputs) {
    const bool may_be_integer = program->has_host_steps || program->gives_integers;
    TORCH_CHECK(at::isFloatingType(output.scalar_type()) || may_be_integer,
                "[run_plan] outputs must be floating where a gradient is wanted, got ",
                output.scalar_type());
  }
  if (!program->detached.empty()) {
    variable_list detached;
    for (const size_t i : program->detached) detached.push_back(outputs[i - program->constants]);
    context->mark_non_differentiable(detached);
  }
  // An output that no loss uses gets no gradient, so that its backward is not computed.
  context->set_materialize_grads(false);
  if (!program->updated.empty()) {
    Tensors updated;
    for (const auto& [index, _] : program->updated) updated.push_back(frame.values[index]);
    context->saved_data[kUpdated] = std::move(updated);
  }
  variable_list saved;
  saved.reserve(program->saved.size());
  for (const int index : program->saved) saved.push_back(frame.values[index]);
  if (host) {
    context->saved_data["host"] = host.owner();
    context->saved_data["host_id"] = static_cast<int64_t>(host->id);
  }
  if (!recorded.empty()) context->saved_data[kRecorded] = std::string(recorded);
  if (program->has_host_steps) {
    const std::vector<Tensors> own = host->saved();
    check_memory(program->plan, own);
    save_own(context, own, saved);
    if (std::ranges::all_of(saved, [](const Tensor& tensor) { return is_real(tensor); })) {
      host->note_saved(saved_slots(*program, tensors, saved, own));
    }
  }
  if (runs_again()) keep_numbers(saved);
  context->save_for_backward(std::move(saved));
  return outputs;
}

variable_list PlanFunction::backward(AutogradContext* context, const variable_list& grads) {
  const c10::IValue& metadata = context->saved_data["metadata"];
  const auto program =
      SharedProgram::from(context->saved_data["program"].toTensor(), unpack_id(metadata));
  SharedHostCall host;
  std::string recorded;
  if (context->saved_data.size() <= kSavedData + (program->updated.empty() ? 0 : 1)) {
    // The call is native, as most are.
  } else if (context->saved_data.count(kRecorded) > 0) {
    recorded = context->saved_data[kRecorded].toStringRef();
  } else {
    host = SharedHostCall::from(context->saved_data["host"].toTensor(),
                                context->saved_data["host_id"].toInt());
  }
  Tensors saved = context->get_saved_variables();
  // Releases the saved tensors now instead of after backward, so that each is freed after its last
  // use.
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    torch::autograd::CppNode<EarlyRelease>::release_variables(*context);
  }
  variable_list result(kFirstTensor);
  if (std::ranges::none_of(grads, [](const Tensor& grad) { return grad.defined(); })) {
    result.resize(kFirstTensor + program->inputs.size() - program->plan.states.size());
    return result;
  }
  const std::vector<bool> wanted = wanted_gradients(*context, *program);
  if (at::GradMode::is_enabled()) {
    std::ranges::move(double_backward(*program, saved, grads, wanted), std::back_inserter(result));
    return result;
  }
  Frame frame{.host = host ? &*host : nullptr};
  const BelowAutograd below_autograd;
  frame.values.resize(program->backward.values);
  frame.is_partial = program->has_host_steps ||
                     std::ranges::any_of(grads, [](const Tensor& grad) { return !grad.defined(); });
  if (program->metadata > 0 && (frame.is_partial || program->always_reads_metadata)) {
    frame.metadata = unpack_metadata(metadata);
  }
  if (frame.is_partial) frame.reached.resize(program->backward.values, false);
  if (program->has_host_steps) frame.own = load_own(context, saved);
  for (size_t i = 0; i < grads.size(); ++i) {
    const int index = program->output_grads[i];
    frame.values[index] = grads[i];
    if (frame.is_partial) frame.reached[index] = grads[i].defined();
  }
  for (const auto& [position, index] : program->more_loads) frame.values[index] = saved[position];
  for (size_t i = 0; i < program->loads.size(); ++i) {
    frame.values[program->loads[i]] = std::move(saved[i]);
  }
  saved.clear();
  if (!program->updated.empty()) {
    const Tensors updated = context->saved_data[kUpdated].toTensorVector();
    for (size_t i = 0; i < updated.size(); ++i) {
      frame.values[program->updated[i].second] = updated[i];
    }
  }
  std::shared_ptr<const PartialBackward> part;
  if (!wanted.empty()) {
    part = program->parts->find_or_make(*program, wanted);
    for (const int value : part->unread) frame.values[value].reset();
  }
  if (part || recorded.empty() || !record_backward(recorded, *program, frame)) {
    interpret(*program, part ? part->code : program->backward, frame);
  }
  for (size_t i = 0; i < program->input_grads.size() - program->plan.states.size(); ++i) {
    const int index = program->input_grads[i];
    const bool is_wanted = index >= 0 && (wanted.empty() || wanted[i]);
    const bool yields = is_wanted && (!frame.is_partial || frame.reached[index]);
    result.push_back(yields ? frame.values[index] : Tensor());
    if (yields && program->views[i]) unshare(result.back());
  }
  return result;
}

}  // namespace transformer_ops
