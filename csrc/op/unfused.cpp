#include "op/unfused.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "fuser/schema.h"

namespace transformer_ops {
namespace {

// The backward of `forward`, as the vector-Jacobian product of its unfused meaning.
Tensors unfused_backward(const TypedOp& forward, const std::string& name,
                         c10::ArrayRef<c10::IValue> arguments) {
  const Schema schema = parse_schema(find_typed_op(name)->schema);
  const auto argument = [&](const std::string& wanted) {
    const auto row = std::ranges::find(schema.arguments, wanted, &Schema::Field::name);
    const bool found = row != schema.arguments.end();
    return found ? arguments[row - schema.arguments.begin()] : c10::IValue();
  };
  const c10::IValue mask = argument("output_mask");
  const auto is_wanted = [&](const std::string& result) {
    for (size_t i = 0; i < schema.results.size(); ++i) {
      if (schema.results[i].name == result) {
        return mask.isNone() || mask.toListRef()[i].toBool();
      }
    }
    return false;
  };
  const Schema forward_schema = parse_schema(forward.schema);
  std::vector<c10::IValue> stack;
  for (const auto& field : forward_schema.arguments) {
    const bool is_switch = field.name.starts_with("save_");
    stack.push_back(is_switch ? c10::IValue(false) : argument(field.name));
    const bool may_be_none = field.type == "Tensor?" && !is_wanted("grad_" + field.name);
    TORCH_CHECK(!stack.back().isNone() || may_be_none, "[", name, "] double backward must have '",
                field.name, "', got none: the first backward did not need it");
  }
  const Tensors grads = differentiate(forward.unfused, name.c_str(), std::move(stack),
                                      argument("grad_output").toTensor());
  Tensors results;
  for (const auto& result : schema.results) {
    const auto& fields = forward_schema.arguments;
    const auto row = std::ranges::find_if(
        fields, [&](const auto& field) { return "grad_" + field.name == result.name; });
    TORCH_CHECK(row != fields.end(), "[", name,
                "] result must be the gradient of an argument, got ", result.name);
    results.push_back(grads[row - fields.begin()]);
  }
  return results;
}

// Bodies run below autograd, and the meaning of a backward calls it.
class WithAutograd {
 public:
  WithAutograd() : keys_(keys()) {}

 private:
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }

  const c10::impl::ForceDispatchKeyGuard keys_;
  const at::AutoGradMode no_graph_{false};
};

bool is_new(const Tensor& tensor, const Args& args) {
  return std::ranges::none_of(args.values(), [&](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && tensor.is_alias_of(value.toTensor());
  });
}

// The op whose backward is `name`, if that has a meaning; else null.
const TypedOp* find_meant_forward(const std::string& name) {
  const TypedOp* const forward = find_typed_op(forward_of(name));
  return forward != nullptr && forward->unfused ? forward : nullptr;
}

// A new tensor of what a caller expects. Results that nobody wants have no elements.
Tensor as_result(const Args& args, const std::string& name, const Tensor& found,
                 const TensorSpec& spec) {
  const Tensor& first = args.tensor(0);
  if (spec.sizes.size() == 1 && spec.sizes[0] == 0) return first.new_empty({0}, spec.dtype);
  TORCH_CHECK(found.defined(), "[", args.op(), "] declaration must have a body for ",
              first.device().type(), ", got an unfused meaning that leaves out ", name);
  check_spec(args, name.c_str(), found, spec);
  const Tensor result = found.detach();
  return is_new(result, args) ? result.contiguous() : result.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

Tensors call_unfused(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  const TypedOp* op = find_typed_op(name);
  TORCH_CHECK(op != nullptr, "[typed op] name must be registered, got '", name, "'");
  std::vector<c10::IValue> values(arguments.begin(), arguments.end());
  const Args args(name.c_str(), values);
  if (op->shape) op->shape(args);  // the same errors as those of the op
  if (op->unfused) return op->unfused(args);
  const TypedOp* const forward = find_meant_forward(name);
  TORCH_CHECK_NOT_IMPLEMENTED(forward != nullptr, "[", name,
                              "] declaration must have .unfused, got none");
  return unfused_backward(*forward, name, arguments);
}

Tensors run_unfused(const std::string& name, const Args& args, const TensorSpecs& specs) {
  const bool is_meant = find_typed_op(name)->unfused || find_meant_forward(name) != nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(is_meant, "[", args.op(), "] declaration must have a body for ",
                              args.tensor(0).device().type(), " or .unfused, got neither");
  const WithAutograd guard;
  const c10::ArrayRef<c10::IValue> values(args.values().data(), args.values().size());
  const Tensors found = call_unfused(name, values);
  const auto fields = parse_schema(find_typed_op(name)->schema).results;
  Tensors results;
  for (size_t i = 0; i < specs.size(); ++i) {
    const Tensor result = i < found.size() ? found[i] : Tensor();
    results.push_back(as_result(args, fields[i].name, result, specs[i]));
  }
  return results;
}

}  // namespace transformer_ops
