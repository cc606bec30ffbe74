#include "executor/deferred_call.h"

#include <algorithm>

#include "executor/interpreter.h"

namespace transformer_ops {
namespace {

bool has_version(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !value.toTensor().is_inference();
}

// The version of a tensor. For a list it is the sum, because versions only increase.
uint32_t version_of(const c10::IValue& value) {
  if (value.isTensorList()) {
    uint32_t sum = 0;
    for (const c10::IValue& item : value.toListRef()) sum += version_of(item);
    return sum;
  }
  if (!has_version(value)) return 0;
  return value.toTensor().unsafeGetTensorImpl()->version_counter().current_version();
}

// The same tensor without its autograd graph.
c10::IValue detached(const c10::IValue& value) {
  if (value.isTensorList()) {
    Tensors list;
    for (const c10::IValue& item : value.toListRef()) list.push_back(detached(item).toTensor());
    return list;
  }
  if (!has_version(value)) return value;
  const auto* const impl = value.toTensor().unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/false));
}

}  // namespace

void push_accumulation(const Accumulation& target, const c10::OperatorHandle& into,
                       torch::jit::Stack& stack) {
  const auto& fields = into.schema().arguments();
  const bool is_list = fields[fields.size() - 2].type()->kind() == c10::TypeKind::ListType;
  if (is_list) {
    stack.emplace_back(target.buffers);
  } else {
    stack.emplace_back(target.buffers[0]);
  }
  stack.emplace_back(target.overwrite);
}

DeferredCall::DeferredCall(Op op, const torch::jit::Stack& arguments) : op_(std::move(op)) {
  for (const c10::IValue& value : arguments) {
    arguments_.push_back(detached(value));
    versions_.push_back(version_of(value));
  }
}

torch::jit::Stack DeferredCall::checked_arguments() const {
  const c10::FunctionSchema& schema = op_.op.schema();
  for (size_t i = 0; i < arguments_.size(); ++i) {
    TORCH_CHECK(version_of(arguments_[i]) == versions_[i], "[",
                schema.name().substr(schema.name().find("::") + 2), "] ",
                schema.arguments()[i].name(),
                " must not be modified in place before its delayed call, got version ",
                version_of(arguments_[i]), " where backward had ", versions_[i]);
  }
  return arguments_;
}

Tensors DeferredCall::run() const {
  torch::jit::Stack stack = checked_arguments();
  const BelowAutograd below_autograd;
  op_.op.callBoxed(stack);
  c10::IValue& found = stack[op_.result];
  Tensors gradients =
      found.isTensorList() ? found.toTensorVector() : Tensors{std::move(found).toTensor()};
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!op_.wanted[i]) gradients[i].reset();
  }
  return gradients;
}

bool DeferredCall::run_into(const Accumulation& target) const {
  const bool all_wanted = std::ranges::find(op_.wanted, false) == op_.wanted.end();
  if (!op_.into || !all_wanted) return false;
  torch::jit::Stack stack = checked_arguments();
  push_accumulation(target, *op_.into, stack);
  const BelowAutograd below_autograd;
  op_.into->callBoxed(stack);
  return true;
}

}  // namespace transformer_ops
