#include "executor/saved.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <set>

#include "executor/interpreter.h"

namespace transformer_ops {
namespace {

uint64_t storage_of(const at::Tensor& tensor) {
  const void* found = tensor.unsafeGetTensorImpl();
  if (tensor.has_storage()) found = tensor.storage().unsafeGetStorageImpl();
  return reinterpret_cast<uint64_t>(found);
}

}  // namespace

SavedSlots saved_slots(const Program& program, at::TensorList tensors, const Tensors& saved,
                       const std::vector<Tensors>& own) {
  std::set<uint64_t> parameters;
  const size_t first_parameter =
      tensors.size() - program.plan.parameters.size() - program.plan.states.size();
  for (const at::Tensor& tensor : tensors.slice(first_parameter)) {
    parameters.insert(storage_of(tensor));
  }
  SavedSlots slots;
  const auto add = [&](int op, const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || parameters.contains(storage_of(tensor))) return;
    const auto bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
    slots.push_back({op, name, bytes, storage_of(tensor)});
  };
  for (const auto& [value, position] : program.saved_slots) {
    if (value.kind != Value::Kind::Slot) continue;
    if (value.part == Value::Part::Scale) {
      // The scale follows the codes, and its bytes are added to theirs.
      slots.back().bytes += static_cast<int64_t>(saved[position].nbytes());
    } else {
      add(value.op, value.name, saved[position]);
    }
  }
  for (size_t op = 0; op < own.size(); ++op) {
    if (op == program.plan.ops.size()) break;  // the row of the host's own
    for (size_t i = 0; i < own[op].size(); ++i) {
      add(static_cast<int>(op), "saved" + std::to_string(i), own[op][i]);
    }
  }
  return slots;
}

Tensors run_on_meta(const Program& program, at::TensorList tensors) {
  Frame frame;
  const BelowAutograd below_autograd;
  // The caller's dispatch modes must only see the real run: selective checkpointing counts calls.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  frame.values.resize(program.forward.values);
  frame.metadata.resize(program.metadata);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto options = at::TensorOptions(tensors[i].scalar_type()).device(at::kMeta);
    frame.values[program.inputs[i]] = at::empty(tensors[i].sizes(), options);
  }
  interpret(program, program.forward, frame);
  return std::move(frame.values);
}

SavedSlots saved_slots_for(const Program& program, at::TensorList tensors) {
  const Tensors values = run_on_meta(program, tensors);
  Tensors inputs, saved;
  for (const int index : program.inputs) {
    const auto options = at::TensorOptions(tensors[inputs.size()].scalar_type()).device(at::kMeta);
    // A value that no line reads any more is freed.
    const bool is_gone = !values[index].defined();
    inputs.push_back(is_gone ? at::empty(tensors[inputs.size()].sizes(), options) : values[index]);
  }
  for (const int index : program.saved) saved.push_back(values[index]);
  return saved_slots(program, inputs, saved, {});
}

}  // namespace transformer_ops
