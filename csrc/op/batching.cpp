#include "op/batching.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace transformer_ops {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// A tensor without the batch dimension of a level, and where that is.
struct Unwrapped {
  Tensor tensor;
  std::optional<int64_t> dim;
};

// The vmap of autograd. A tensor has the batch dimensions of all levels; the innermost is the last.
struct OfAutograd {
  explicit OfAutograd(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
      if (const auto* const impl = at::maybeGetBatchedImpl(tensor)) {
        level_ = std::max(level_, impl->bdims().back().level());
      }
    }
  }

  Unwrapped unwrap(const Tensor& tensor) const {
    const auto* const impl = at::maybeGetBatchedImpl(tensor);
    if (impl == nullptr || impl->bdims().back().level() != level_) return {tensor, std::nullopt};
    // The other batch dimensions stay, and are not counted.
    Tensor rest = impl->value();
    std::vector<int64_t> known;
    const auto visible = [&](int64_t dim) {
      return dim - std::ranges::count_if(known, [&](int64_t other) { return other < dim; });
    };
    for (const at::BatchDim& one : impl->bdims().slice(0, impl->bdims().size() - 1)) {
      rest = at::addBatchDim(std::move(rest), one.level(), visible(one.dim()));
      known.push_back(one.dim());
    }
    return {std::move(rest), visible(impl->bdims().back().dim())};
  }
  Tensor wrap(Tensor stacked) const { return at::addBatchDim(std::move(stacked), level_, 0); }

  int64_t level_ = -1;
};

template <typename Function>
IValue map_tensors(const IValue& value, const Function& function) {
  const auto one = [&](const Tensor& tensor) {
    return tensor.defined() ? function(tensor) : tensor;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
  return list;
}

// The results of the calls as one.
IValue stack_results(const std::vector<IValue>& results, const OfAutograd& vmap) {
  if (!results[0].isTensorList()) {
    std::vector<Tensor> tensors;
    for (const IValue& result : results) tensors.push_back(result.toTensor());
    return tensors[0].defined() ? vmap.wrap(at::stack(tensors)) : Tensor();
  }
  c10::List<Tensor> list;
  for (size_t k = 0; k < results[0].toListRef().size(); ++k) {
    std::vector<IValue> tensors;
    for (const IValue& result : results) tensors.push_back(result.toListRef()[k]);
    list.push_back(stack_results(tensors, vmap).toTensor());
  }
  return list;
}

void run_for_each(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  std::vector<Tensor> tensors;
  for (const IValue& argument : arguments) {
    map_tensors(argument, [&](const Tensor& tensor) { return tensors.emplace_back(tensor); });
  }
  const OfAutograd vmap(tensors);
  int64_t size = 0;
  for (const Tensor& tensor : tensors) {
    const auto [value, dim] = vmap.unwrap(tensor);
    if (dim) size = value.size(*dim);
  }
  TORCH_CHECK(size > 0, "[", op.schema().name(), "] batch must not be empty, got size 0");
  std::vector<std::vector<IValue>> results(op.schema().returns().size());
  for (int64_t i = 0; i < size; ++i) {
    Stack call;
    for (const IValue& argument : arguments) {
      call.push_back(map_tensors(argument, [&](const Tensor& tensor) {
        const auto [value, dim] = vmap.unwrap(tensor);
        return dim ? value.select(*dim, i) : value;
      }));
    }
    op.callBoxed(call);
    for (size_t k = 0; k < results.size(); ++k) results[k].push_back(call[k]);
  }
  for (const auto& result : results) stack->push_back(stack_results(result, vmap));
}

}  // namespace

void add_batching(torch::Library& library, const std::string& name) {
  library.impl(name.c_str(),
               torch::dispatch(c10::DispatchKey::Batched,
                               torch::CppFunction::makeFromBoxedFunction<run_for_each>()));
}

}  // namespace transformer_ops
