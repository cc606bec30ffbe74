#include "wrappers/collective.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>
#include <string>

namespace transformer_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

c10::OperatorHandle find_collective(const std::string& name) {
  const auto found = c10::Dispatcher::singleton().findSchema({"_c10d_functional::" + name, ""});
  TORCH_CHECK(found.has_value(), "[collective] torch must have _c10d_functional::", name,
              ", got a build without torch.distributed");
  return *found;
}

// The call is boxed, because the type of the group differs between versions of torch. All versions
// accept its name.
template <typename... Arguments>
void call(const Checks& check, const Ranks& ranks, const c10::OperatorHandle& op,
          const Arguments&... arguments) {
  torch::jit::Stack stack;
  (stack.emplace_back(arguments), ...);
  try {
    op.callBoxed(stack);
  } catch (c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK(text.find("resolve the process group") == std::string::npos, "[", check.op(),
                "] process group '", ranks.group, "' must exist in this process, got none: it was ",
                "never made here, or is destroyed");
    error.add_context(c10::str("[", check.op(), "] over process group '", ranks.group, "'"));
    throw;
  } catch (const std::runtime_error& error) {  // gloo raises this
    TORCH_CHECK(false, "[", check.op(), "] process group '", ranks.group,
                "' must have all its ranks, got: ", error.what());
  }
}

std::string name_of(const Ranks& ranks) { return std::string(ranks.group); }

c10::SymInt row_count(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks) {
  check.compute_dtype(name, tensor);
  check.has_rows(name, tensor);
  // The limit prevents any number of rows from overflowing.
  constexpr int64_t kMost = int64_t{1} << 20;
  TORCH_CHECK(ranks >= 1 && ranks <= kMost, "[", check.op(), "] group_size must be between 1 and ",
              kMost, ", got ", ranks);
  return tensor.sym_size(0);
}

TensorSpec with_rows(const Tensor& tensor, c10::SymInt rows) {
  TensorSpec spec = like(tensor);
  spec.sizes[0] = std::move(rows);
  return spec;
}

// ---- decompositions

// Calls one of our typed ops, for any device and under any tracer.
Tensor run(const char* name, const Tensor& input, int64_t ranks, c10::string_view group) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  return op.typed<Tensor(const Tensor&, int64_t, c10::string_view)>().call(input, ranks, group);
}

struct Gather;
struct Scatter;
struct Reduce;
struct ReduceGradient;

struct Gather {
  static constexpr auto kOp = "transformer_ops::all_gather";
  using Derivative = Scatter;
};
struct Scatter {
  static constexpr auto kOp = "transformer_ops::reduce_scatter";
  using Derivative = Gather;
};
struct Reduce {
  static constexpr auto kOp = "transformer_ops::all_reduce";
  using Derivative = ReduceGradient;
};
struct ReduceGradient {
  static constexpr auto kOp = "transformer_ops::reduce_gradient";
  using Derivative = Reduce;
};

template <typename Forward>
class Differentiable : public torch::autograd::Function<Differentiable<Forward>> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input, int64_t ranks,
                        const std::string& group) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["group"] = group;
    return run(Forward::kOp, input, ranks, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    using Backward = typename Forward::Derivative;
    const int64_t ranks = context->saved_data["ranks"].toInt();
    const std::string group = context->saved_data["group"].toStringRef();
    return {Differentiable<Backward>::apply(grads[0], ranks, group), Tensor(), Tensor()};
  }
};

template <typename Forward>
Tensor decomposition(const Checks& check, const Tensor& input, int64_t ranks,
                     std::string_view group) {
  const bool is_transformed = c10::impl::tls_local_dispatch_key_set().included_.has(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  TORCH_CHECK_NOT_IMPLEMENTED(!is_transformed, "[", check.op(),
                              "] collectives must run outside of torch.func, got a transform");
  return Differentiable<Forward>::apply(input, ranks, std::string(group));
}

}  // namespace

TensorSpec gathered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks) {
  return with_rows(tensor, row_count(check, name, tensor, ranks) * ranks);
}

TensorSpec scattered(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks) {
  const c10::SymInt rows = row_count(check, name, tensor, ranks);
  TORCH_CHECK((rows % ranks) == 0, "[", check.op(), "] ", name,
              " must have a first dimension divisible by ", ranks, ", got shape ",
              tensor.sym_sizes());
  return with_rows(tensor, rows / ranks);
}

TensorSpec reduced(const Checks& check, const char* name, const Tensor& tensor, int64_t ranks) {
  row_count(check, name, tensor, ranks);
  return like(tensor);
}

void start_gather(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output) {
  static const c10::OperatorHandle op = find_collective("all_gather_into_tensor_out");
  if (output.numel() > 0) call(check, ranks, op, input, ranks.count, name_of(ranks), output);
}

void start_scatter(const Checks& check, const Tensor& input, const Ranks& ranks, Tensor& output) {
  static const c10::OperatorHandle op = find_collective("reduce_scatter_tensor_out");
  if (input.numel() == 0) return;
  call(check, ranks, op, input, "sum", ranks.count, name_of(ranks), output);
}

void start_reduce(const Checks& check, const Ranks& ranks, Tensor& in_place) {
  static const c10::OperatorHandle op = find_collective("all_reduce_");
  if (in_place.numel() > 0) call(check, ranks, op, in_place, "sum", name_of(ranks));
}

void finish(const Checks& check, const Ranks& ranks, const Tensor& result) {
  static const c10::OperatorHandle op = find_collective("wait_tensor");
  if (result.numel() > 0) call(check, ranks, op, result);
}

Tensor gather_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group) {
  return decomposition<Gather>(check, input, ranks, group);
}

Tensor scatter_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                          std::string_view group) {
  return decomposition<Scatter>(check, input, ranks, group);
}

Tensor reduce_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                         std::string_view group) {
  return decomposition<Reduce>(check, input, ranks, group);
}

Tensor reduce_gradient_decomposed(const Checks& check, const Tensor& input, int64_t ranks,
                                  std::string_view group) {
  return decomposition<ReduceGradient>(check, input, ranks, group);
}

}  // namespace transformer_ops
