#include "op/main_grad.h"

#include <ATen/MemoryOverlap.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace transformer_ops {
namespace {

void check_apart(const Call& call, const Tensor& buffer, const c10::IValue& value) {
  if (value.isTensorList()) {
    for (const c10::IValue& item : value.toListRef()) check_apart(call, buffer, item);
  }
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const auto overlap = at::get_overlap_status(buffer, value.toTensor());
  TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
              "[", call.op(),
              "] main_grad must share no memory with an argument, got one of shape ",
              value.toTensor().sym_sizes());
}

void check_main_grad(const Call& call, Values values, const Tensor& buffer,
                     const TensorSpec& grad_weight) {
  call.compute_dtype("main_grad", buffer);
  TORCH_CHECK(buffer.sym_sizes().equals(grad_weight.sizes), "[", call.op(),
              "] main_grad must have shape ", c10::SymIntArrayRef(grad_weight.sizes), ", got ",
              buffer.sym_sizes());
  TORCH_CHECK(at::has_internal_overlap(buffer) != at::MemOverlap::Yes, "[", call.op(),
              "] main_grad must have memory for each element, got strides ", buffer.sym_strides());
  for (const auto& value : values) check_apart(call, buffer, value);
}

// Raises if two buffers overlap. Many are views of one flat buffer, so each is compared with the
// next one in memory.
void check_apart(const Call& call, Tensors buffers) {
  const auto place = [](const Tensor& buffer) {
    return std::pair(buffer.storage().unsafeGetStorageImpl(),
                     buffer.sym_storage_offset().maybe_as_int().value_or(0));
  };
  std::ranges::sort(buffers, {}, place);
  for (size_t i = 1; i < buffers.size(); ++i) {
    const auto overlap = at::get_overlap_status(buffers[i - 1], buffers[i]);
    TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
                "[", call.op(),
                "] main_grad must be a separate buffer for each weight, got two of shape ",
                buffers[i].sym_sizes(), " that share memory");
  }
}

void put(const Tensor& buffer, bool adds, const Tensor& result) {
  adds ? buffer.add_(result) : buffer.copy_(result);
}

void bump_version(const Tensor& buffer) {
  if (!buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
}

thread_local bool asks_the_engine = false;

void check_asked(const Call& call, const torch::autograd::Node& node, const Tensor& buffer) {
  for (uint32_t i = 0; i < node.num_outputs(); ++i) {
    const auto* const leaf =
        dynamic_cast<const torch::autograd::AccumulateGrad*>(node.next_edge(i).function.get());
    if (leaf == nullptr || !leaf->variable.sizes().equals(buffer.sizes())) continue;
    TORCH_CHECK(
        node.task_should_compute_output(i), "[", call.op(),
        "] compiled code must be asked for the gradients of all its weights that accumulate "
        "into main_grad, got a backward that leaves out one of shape ",
        leaf->variable.sizes());
  }
}

}  // namespace

AsksTheEngine::AsksTheEngine() : before_(std::exchange(asks_the_engine, true)) {}
AsksTheEngine::~AsksTheEngine() { asks_the_engine = before_; }

void check_asked(const Call& call) {
  if (asks_the_engine) return;
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return;
  const auto& [buffer, adds, buffers] = call.main_grad();
  if (buffer.defined()) check_asked(call, *node, buffer);
  for (const Tensor& each : buffers) check_asked(call, *node, each);
}

void check_main_grad(const Call& call, Values values, const TensorSpec& grad_weight) {
  const auto& [buffer, adds, buffers] = call.main_grad();
  if (!grad_weight.list) return check_main_grad(call, values, buffer, grad_weight);
  TORCH_CHECK(buffers.size() == grad_weight.list->size(), "[", call.op(),
              "] main_grad must have a buffer for each of ", grad_weight.list->size(),
              " weights, got ", buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    check_main_grad(call, values, buffers[i], (*grad_weight.list)[i]);
  }
  check_apart(call, buffers);
}

void put(const MainGrad& main_grad, const Results& results, size_t place) {
  const auto& [buffer, adds, buffers] = main_grad;
  if (buffer.defined()) put(buffer, adds, results.tensors[place]);
  for (size_t i = 0; i < buffers.size(); ++i) put(buffers[i], adds, results.lists[place][i]);
}

void bump_versions(const MainGrad& main_grad) {
  if (main_grad.buffer.defined()) bump_version(main_grad.buffer);
  for (const Tensor& buffer : main_grad.buffers) bump_version(buffer);
}

}  // namespace transformer_ops
