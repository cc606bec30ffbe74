#include "op/frame.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "fuser/fork_safe_mutex.h"
#include "op/backend.h"
#include "op/batching.h"
#include "op/buffer.h"
#include "op/codes.h"
#include "op/decomposition.h"
#include "op/main_grad.h"
#include "op/run_call.h"
#include "op/torch_library.h"

namespace transformer_ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

// Pushes the results on the stack. `skipped` is a result that the schema of this form does not
// have; no result is a list then.
void push_results(Stack* stack, size_t arguments, Results results, std::optional<size_t> skipped,
                  const std::vector<bool>& lists) {
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end());
  for (size_t i = 0; i < results.tensors.size(); ++i) {
    if (i == skipped || (skipped && !lists.empty() && lists[i])) continue;
    if (!lists.empty() && lists[i]) {
      stack->emplace_back(std::move(results.lists[i]));
    } else {
      stack->emplace_back(std::move(results.tensors[i]));
    }
  }
}

// Groups the tensors that a kernel wrapper returned one after another into results and lists.
Results grouped(const std::string& name, Tensors found, const TensorSpecs& specs) {
  size_t count = 0;
  for (const TensorSpec& spec : specs) count += spec.list ? spec.list->size() : 1;
  TORCH_CHECK(found.size() == count, "[", name, "] body must return ", count,
              " tensors, those of lists too, got ", found.size());
  Results results;
  results.lists.resize(specs.size());
  auto next = std::make_move_iterator(found.begin());
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].list) {
      results.tensors.push_back(*next++);
      continue;
    }
    results.tensors.emplace_back();
    for (size_t k = 0; k < specs[i].list->size(); ++k) results.lists[i].push_back(*next++);
  }
  return results;
}

// The common part of every kernel of a typed op.
class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(const Variant& variant) : variant_(variant), op_(variant.op) {}

 protected:
  static constexpr size_t kGradWeight = 1;  // the index of the result that may go into main_grad

  Values arguments(Stack* stack) const {
    const size_t count = variant_.arguments;
    return {stack->data() + stack->size() - count, count};
  }

  // Raises if the arguments do not match the schema.
  Call check_arguments(Values values) const {
    const char* const name = variant_.name.c_str();
    variant_.signature.check(name, values);
    const Form form = variant_.form;
    Values added = values.last(form.added_arguments());
    OperandScales scales;
    if (form.is_scaled) {
      scales = {scale_of("left_scale", added[0]), scale_of("right_scale", added[1])};
      added = added.subspan(2);
    }
    MainGrad main_grad;
    if (form.is_into) {
      main_grad.adds = !added[1].toBool();
      if (added[0].isTensor()) {
        main_grad.buffer = added[0].toTensor();
      } else {
        main_grad.buffers = added[0].toTensorVector();
      }
    }
    return Call(name, std::move(main_grad), std::move(scales), form.is_scaled);
  }

  // The arguments that kernel wrappers see: those without scales, main_grad and its flag.
  Values own(Values values) const {
    return values.first(values.size() - variant_.form.added_arguments());
  }

  TensorSpecs shape(const Call& call, Values own) const {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.shape, "[", call.op(),
                                "] declaration must have .shape, got none");
    TensorSpecs specs = op_.shape(call, own);
    for (size_t i = 0; variant_.form.is_into && i < variant_.lists.size(); ++i) {
      TORCH_CHECK(i == kGradWeight || !specs[i].list || specs[i].list->empty(), "[", call.op(),
                  "] output_mask must name no other list of gradients, got result ", i);
    }
    if (variant_.form.is_into) check_main_grad(call, own, specs[kGradWeight]);
    return specs;
  }

  Results as_results(Tensors found, const TensorSpecs& specs) const {
    if (variant_.lists.empty()) return {.tensors = std::move(found)};
    return grouped(variant_.name, std::move(found), specs);
  }

  void push(Stack* stack, size_t arguments, Results results) const {
    const auto skipped = variant_.form.is_into ? std::optional(kGradWeight) : std::nullopt;
    push_results(stack, arguments, std::move(results), skipped, variant_.lists);
  }

  Tensor scale_of(const char* argument, c10::IValue& value) const {
    const Tensor* const scale = BodyParameter<const Tensor*>::get(value);
    const bool fits = scale == nullptr || scale->scalar_type() == at::kFloat ||
                      (scale->scalar_type() == at::kByte && scale->dim() > 0);
    TORCH_CHECK(fits, "[", variant_.name, "] ", argument,
                " must be one float32 without dimensions, or one for each block of codes, got ",
                scale->scalar_type(), " of shape ", scale->sym_sizes());
    return or_undefined(scale);
  }

  const Variant& variant_;
  const TypedOp& op_;
};

class MetaKernel final : public Kernel {
 public:
  using Kernel::Kernel;

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) const { run(stack); }

  void run(Stack* stack) const {
    const auto values = arguments(stack);
    const Call call = check_arguments(values);
    const auto options = variant_.signature.first_tensor(values).options();
    Tensors found;
    const auto add = [&](const TensorSpec& spec) {
      found.push_back(at::empty_symint(spec.sizes, options.dtype(spec.dtype)));
    };
    const TensorSpecs specs = shape(call, own(values));
    for (const auto& spec : specs) {
      if (spec.list) {
        for (const auto& one : *spec.list) add(one);
      } else {
        add(spec);
      }
    }
    Results results = as_results(std::move(found), specs);
    push(stack, values.size(), std::move(results));
  }
};

template <Body Bodies::*body>
class DeviceKernel final : public Kernel {
 public:
  using Kernel::Kernel;

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) const { run(stack); }

  void run(Stack* stack) const {
    // Inner ATen calls go straight to their kernels.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto values = arguments(stack);
    const Call call = check_arguments(values);
    if (variant_.form.is_into) check_asked(call);
    const auto device = variant_.signature.first_tensor(values).device();
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
    TORCH_CHECK_NOT_IMPLEMENTED(!variant_.form.is_scaled || op_.bodies.*body, "[", variant_.name,
                                "] declaration must have a body for ", device.type(), ", got none");
    Results results =
        op_.bodies.*body ? run_body(call, device, values) : decompose(call, own(values));
    if (variant_.form.is_into) bump_versions(call.main_grad());
    push(stack, values.size(), std::move(results));
  }

 private:
  Results run_body(const Call& call, c10::Device device, Values values) const {
    // The kernel wrappers of other libraries need no CUDA backend of ours.
    if (body == &Bodies::cuda && !has_namespace(variant_.name)) check_backend();
    const TensorSpecs specs = shape(call, own(values));
    variant_.signature.make_contiguous(values);
    if (variant_.form.is_scaled && body == &Bodies::cpu) {
      return run_body(decoded(call, own(values)), specs, device, values);
    }
    return run_body(call, specs, device, values);
  }

  Results run_body(const Call& call, const TensorSpecs& specs, c10::Device device,
                   Values values) const {
    Results results;
    const bool fills = (op_.bodies.*body).fills();
    if (fills) results = allocate(specs, device, call, values);
    (op_.bodies.*body)(call, own(values), results);
    if (!fills) results = as_results(std::move(results.tensors), specs);
    return results;
  }

  // Replaces codes by their values, multiplied by any block scales, which is exact in bfloat16.
  Call decoded(const Call& call, Values values) const {
    OperandScales scales = call.scales();
    Tensor* scale = &scales.left;
    const auto [left_by_rows, right_by_rows] = sums_rows(values);
    for (c10::IValue& value : values) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const Tensor& tensor = value.toTensor();
      if (is_codes(tensor.scalar_type()) && has_pairs(tensor)) {
        value = times_blocks_of_pairs(tensor, *scale,
                                      scale == &scales.left ? left_by_rows : right_by_rows);
        *scale = scale_of_tensor(*scale);
      } else if (is_codes(tensor.scalar_type())) {
        const bool has_blocks = is_of_blocks(*scale);
        value = has_blocks ? times_blocks(tensor, *scale) : tensor.to(at::kBFloat16);
        if (has_blocks) *scale = Tensor();
      }
      // The first tensor is the left operand; one of the others has codes.
      scale = &scales.right;
    }
    return Call(variant_.name.c_str(), call.main_grad(), std::move(scales), /*takes_codes=*/true);
  }

  // Are the left and the right operand summed over their rows? In forward neither is. A backward
  // with a mask computes the gradient of an input, or that of a weight.
  static std::pair<bool, bool> sums_rows(Values values) {
    const auto mask = std::ranges::find_if(values, [](auto& value) { return value.isBoolList(); });
    if (mask == values.end()) return {false, false};
    return {!mask->toBoolList().get(0), true};
  }

  Results decompose(const Call& call, Values own) const {
    const TensorSpecs specs = shape(call, own);
    Results results = as_results(run_decomposition(variant_.base, call, own, specs), specs);
    put(call.main_grad(), results, kGradWeight);
    return results;
  }

  void check_backend() const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        cuda::backend() != nullptr, "[", variant_.name,
        "] tensors must be on the CPU in this build, got a CUDA tensor; build transformer_ops with "
        "TRANSFORMER_OPS_CUDA=ON and a CUDA toolkit (README.md, \"CUDA\")");
  }

  // Allocates without the dispatcher, because sizes are plain integers here.
  Results allocate(const TensorSpecs& specs, c10::Device device, const Call& call,
                   Values values) const {
    Results found;
    Tensors& results = found.tensors;
    results.reserve(specs.size());
    if (!variant_.lists.empty()) found.lists.resize(specs.size());
    for (const auto& spec : specs) {
      const size_t place = results.size();
      const bool is_main_grad = variant_.form.is_into && place == kGradWeight;
      if (spec.list) {
        found.lists[place] = is_main_grad ? call.main_grad().buffers : allocate(*spec.list, device);
        results.emplace_back();
        continue;
      }
      if (is_main_grad) {
        results.push_back(call.main_grad().buffer);
        continue;
      }
      const auto sizes = C10_AS_INTARRAYREF_SLOW(spec.sizes);
      if (results.empty()) {
        if (Tensor buffer = take_result_buffer(sizes, spec.dtype, device); buffer.defined()) {
          results.push_back(std::move(buffer));
          continue;
        }
      }
      const Tensor* const again =
          results.empty() ? find_memory(values, sizes, spec.dtype) : nullptr;
      results.push_back(again != nullptr ? *again : empty(sizes, spec.dtype, device));
    }
    return found;
  }

  static Tensors allocate(const std::vector<TensorSpec>& list, c10::Device device) {
    Tensors tensors;
    tensors.reserve(list.size());
    for (const TensorSpec& spec : list) {
      tensors.push_back(empty(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype, device));
    }
    return tensors;
  }

  const Tensor* find_memory(Values values, at::IntArrayRef sizes, at::ScalarType dtype) const {
    for (const size_t i : variant_.overwrites) {
      const Tensor& tensor = values[i].toTensor();
      if (tensor.scalar_type() == dtype && tensor.sizes() == sizes && is_last_reference(tensor)) {
        return &tensor;
      }
    }
    return nullptr;
  }
};

std::function<void()>& autograd_maker() {
  static std::function<void()> make;
  return make;
}

// torch.library.register_autograd adds a Python kernel that takes most of the time of a compiled
// call, even if no gradient is wanted. This kernel runs first and calls that one only if needed.
class AutogradShortcut final : public Kernel {
 public:
  using Kernel::Kernel;

  void operator()(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack) const {
    const DispatchKeySet rest = keys & c10::after_autograd_keyset;
    const Values values = arguments(stack);
    if (const auto wanting = std::ranges::find_if(values, wants_gradient);
        wanting != values.end()) {
      check_differentiable(handle, wanting - values.begin());
      if (!is_made_.load(std::memory_order_acquire)) [[unlikely]] {
        if (autograd_maker()) autograd_maker()();
        is_made_.store(true, std::memory_order_release);
      }
      // AutogradOther has the Python kernel too.
      return handle.redispatchBoxed(rest.add(DispatchKey::AutogradOther), stack);
    }
    const at::AutoDispatchBelowAutograd below_autograd;
    handle.redispatchBoxed(rest, stack);
  }

 private:
  // Raises if a gradient would be recorded for a form that has none: plans compute gradients
  // themselves.
  void check_differentiable(const OperatorHandle& handle, ptrdiff_t argument) const {
    const Form form = variant_.form;
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.differentiable && !form.is_scaled && !form.is_into, "[", variant_.name, "] ",
        handle.schema().arguments()[argument].name(),
        " must not require a gradient, because none passes through this op, got "
        "one that does; detach() it, "
        "or call the op under torch.no_grad()");
  }

  mutable std::atomic<bool> is_made_ = false;
};

// The variants that have a schema in torch. The lock is for libraries loaded while others run.
struct InTorch {
  ForkSafeMutex mutex;
  std::vector<const Variant*> variants;
};

InTorch& in_torch() {
  static InTorch in_torch;
  return in_torch;
}

template <typename KernelType>
void add_kernel(const Variant& variant, DispatchKey key) {
  auto kernel = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<KernelType>(variant));
  torch_library(variant.name).impl(variant.name.c_str(), torch::dispatch(key, std::move(kernel)));
}

}  // namespace

const std::initializer_list<DispatchKey>& autograd_keys() {
  static const auto keys = {DispatchKey::AutogradCPU,  DispatchKey::AutogradCUDA,
                            DispatchKey::AutogradMeta, DispatchKey::AutogradMPS,
                            DispatchKey::AutogradXPU,  DispatchKey::AutogradPrivateUse1};
  return keys;
}

void add_to_torch(const Variant& variant) {
  {
    const std::lock_guard lock(in_torch().mutex);
    in_torch().variants.push_back(&variant);
  }
  const std::vector<at::Tag> random_tags = {at::Tag::pt2_compliant_tag,
                                            at::Tag::nondeterministic_seeded};
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  torch_library(variant.name).def(variant.schema.c_str(), variant.op.random ? random_tags : tags);
  add_kernel<MetaKernel>(variant, DispatchKey::Meta);
  add_kernel<DeviceKernel<&Bodies::cpu>>(variant, DispatchKey::CPU);
  add_kernel<DeviceKernel<&Bodies::cuda>>(variant, DispatchKey::CUDA);
  for (const auto key : autograd_keys()) add_kernel<AutogradShortcut>(variant, key);
  if (!variant.op.random) add_batching(torch_library(variant.name), variant.name);
}

void register_cuda_bodies(DispatchKey key) {
  std::vector<const Variant*> variants;
  {
    const std::lock_guard lock(in_torch().mutex);
    variants = in_torch().variants;
  }
  for (const Variant* variant : variants) add_kernel<DeviceKernel<&Bodies::cuda>>(*variant, key);
  add_run_call(key);
}

void run_kernel(const Variant& variant, KernelKind kind, Stack* stack) {
  switch (kind) {
    case KernelKind::Meta:
      return MetaKernel(variant).run(stack);
    case KernelKind::Cpu:
      return DeviceKernel<&Bodies::cpu>(variant).run(stack);
    case KernelKind::Cuda:
      return DeviceKernel<&Bodies::cuda>(variant).run(stack);
  }
}

bool wants_gradient(const c10::IValue& value) {
  if (value.isTensorList()) return std::ranges::any_of(value.toListRef(), wants_gradient);
  if (!value.isTensor()) return false;
  const Tensor& tensor = value.toTensor();
  // Forward-mode AD works under no_grad too.
  return (at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor);
}

void refuse_gradients(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient(values[i]), "[",
                                op.schema().name().substr(op.schema().name().find("::") + 2), "] ",
                                arguments[i].name(),
                                " must not require a gradient, because none passes ",
                                "through this op, got one that does; detach() it, or call the op ",
                                "under torch.no_grad()");
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void set_autograd_maker(std::function<void()> make) { autograd_maker() = std::move(make); }

}  // namespace transformer_ops
