#include "op/decomposition.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "fuser/declaration.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/schema.h"

namespace transformer_ops {
namespace {

// The schemas of typed ops by address, which never changes. The lock is for libraries loaded later.
struct Schemas {
  ForkSafeMutex mutex;
  std::map<const TypedOp*, Schema> rows;
};

// It is never deleted, because a thread may run while static objects are destroyed.
Schemas& schemas = *new Schemas;

// Parses each schema once.
const Schema& schema_of(const TypedOp& op) {
  const std::lock_guard lock(schemas.mutex);
  const auto [row, is_new] = schemas.rows.try_emplace(&op);
  if (is_new) row->second = parse_schema(op.schema);
  return row->second;
}

// The tensors of an argument: all of a list, or one, which may be undefined.
Tensors tensors_of(const c10::IValue& value) {
  return value.isTensorList() ? value.toTensorVector() : Tensors{value.toTensor()};
}

// The gradients of the first result for the arguments at `places`; those of lists come one after
// another.
Tensors gradients_of(const Decomposition& decomposition, const Checks& check,
                     std::vector<c10::IValue> arguments, const std::vector<size_t>& places,
                     const Tensor& grad_output) {
  Tensors inputs;
  for (const size_t place : places) {
    std::ranges::move(tensors_of(arguments[place]), std::back_inserter(inputs));
  }
  const auto first_result = [&](const Tensors& leaves) {
    auto next = leaves.begin();
    for (const size_t place : places) {
      if (arguments[place].isTensorList()) {
        const auto end = next + std::ssize(arguments[place].toListRef());
        arguments[place] = Tensors(next, end);
        next = end;
      } else {
        arguments[place] = *next++;
      }
    }
    return decomposition(check, arguments)[0];
  };
  return differentiate(first_result, inputs, grad_output);
}

// May the argument be omitted? For a list, the declaration says so.
bool may_be_absent(const TypedOp& op, const Schema::Field& field) {
  if (!field.may_be_absent()) return false;
  const OpDeclaration* const row = find_declaration_of(schema_of(op).name);
  const auto* const list = row == nullptr ? nullptr : row->list_of(field.name);
  return list == nullptr || list->optional;
}

// Computes the backward of `forward` as the vector-Jacobian product of its decomposition.
Tensors decomposed_backward(const TypedOp& forward, const std::string& name,
                            c10::ArrayRef<c10::IValue> arguments) {
  const Schema& schema = schema_of(*find_typed_op(name));
  const auto argument = [&](const std::string& wanted) {
    const auto row = std::ranges::find(schema.arguments, wanted, &Schema::Field::name);
    const bool found = row != schema.arguments.end();
    return found ? arguments[row - schema.arguments.begin()] : c10::IValue();
  };
  const c10::IValue mask = argument("output_mask");
  const auto is_wanted = [&](size_t result) {
    return mask.isNone() || mask.toListRef()[result].toBool();
  };
  const auto& fields = schema_of(forward).arguments;
  // For each wanted result, the forward argument whose gradient it is, and the index of the result.
  std::vector<size_t> places, wanted;
  for (size_t k = 0; k < schema.results.size(); ++k) {
    const std::string& result = schema.results[k].name;
    const auto row = std::ranges::find_if(
        fields, [&](const auto& field) { return "grad_" + field.name == result; });
    TORCH_CHECK(row != fields.end(), "[", name,
                "] result must be the gradient of an argument, got ", result);
    if (!is_wanted(k)) continue;
    places.push_back(row - fields.begin());
    wanted.push_back(k);
  }
  std::vector<c10::IValue> stack;
  for (size_t i = 0; i < fields.size(); ++i) {
    const auto& [type, field, _] = fields[i];
    const bool is_switch = field.starts_with("save_");
    stack.push_back(is_switch ? c10::IValue(false) : argument(field));
    const bool is_none =
        stack.back().isNone() || (stack.back().isTensorList() && stack.back().toListRef().empty());
    const bool is_missing =
        is_none && (std::ranges::count(places, i) > 0 || !may_be_absent(forward, fields[i]));
    TORCH_CHECK(!is_missing, "[", name, "] double backward must have '", field,
                "', got none: the first backward did not need it");
  }
  std::vector<size_t> counts;  // the number of tensors of each argument
  for (const size_t place : places) counts.push_back(tensors_of(stack[place]).size());
  const Tensors grads = gradients_of(forward.bodies.decomposition, Checks(name.c_str()),
                                     std::move(stack), places, argument("grad_output").toTensor());
  Tensors results;
  auto next = grads.begin();
  for (size_t k = 0; k < schema.results.size(); ++k) {
    const auto place = std::ranges::find(wanted, k) - wanted.begin();
    if (place < std::ssize(wanted)) {
      for (size_t i = 0; i < counts[place]; ++i) results.push_back(*next++);
    } else if (schema.results[k].type != "Tensor[]") {
      results.emplace_back();
    }
  }
  return results;
}

bool is_new(const Tensor& tensor, Values values) {
  return std::ranges::none_of(values, [&](const c10::IValue& value) {
    if (!value.isTensor() && !value.isTensorList()) return false;
    return std::ranges::any_of(tensors_of(value), [&](const Tensor& other) {
      return other.defined() && tensor.is_alias_of(other);
    });
  });
}

// The op whose backward is `name`, if it has a decomposition; else null.
const TypedOp* find_decomposed_forward(const std::string& name) {
  const TypedOp* const forward = find_typed_op(forward_of(name));
  return forward != nullptr && forward->bodies.decomposition ? forward : nullptr;
}

// Returns a new tensor of the expected size and dtype. Results that are not wanted have no
// elements.
Tensor as_result(const Checks& check, Values values, const std::string& name, const Tensor& found,
                 const TensorSpec& spec) {
  const Tensor first = tensors_of(values[0])[0];
  if (spec.sizes.size() == 1 && spec.sizes[0] == 0) return first.new_empty({0}, spec.dtype);
  TORCH_CHECK(found.defined(), "[", check.op(), "] declaration must have a body for ",
              first.device().type(), ", got a decomposition that leaves out ", name);
  check.spec(name.c_str(), found, spec);
  const Tensor result = found.detach();
  return is_new(result, values) ? result.contiguous() : result.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

c10::impl::LocalDispatchKeySet WithAutograd::keys() {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return keys;
}

Tensors call_decomposition(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  const TypedOp* op = find_typed_op(name);
  TORCH_CHECK(op != nullptr, "[typed op] name must be registered, got '", name, "'");
  std::vector<c10::IValue> values(arguments.begin(), arguments.end());
  const Checks check(name.c_str());
  if (op->shape) op->shape(check, values);  // raises the same errors as the op itself
  if (op->bodies.decomposition) return op->bodies.decomposition(check, values);
  const TypedOp* const forward = find_decomposed_forward(name);
  TORCH_CHECK_NOT_IMPLEMENTED(forward != nullptr, "[", name,
                              "] declaration must have .bodies.decomposition, got none");
  return decomposed_backward(*forward, name, arguments);
}

Tensors run_decomposition(const std::string& name, const Checks& check, Values values,
                          const TensorSpecs& specs) {
  const bool is_decomposed =
      find_typed_op(name)->bodies.decomposition || find_decomposed_forward(name) != nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(is_decomposed, "[", check.op(), "] declaration must have a body for ",
                              tensors_of(values[0])[0].device().type(),
                              " or .bodies.decomposition, got neither");
  const WithAutograd guard;
  const Tensors found =
      call_decomposition(name, c10::ArrayRef<c10::IValue>(values.data(), values.size()));
  const auto& fields = schema_of(*find_typed_op(name)).results;
  Tensors results;
  size_t next = 0;
  const auto add = [&](const std::string& name, const TensorSpec& spec) {
    const Tensor result = next < found.size() ? found[next] : Tensor();
    ++next;
    results.push_back(as_result(check, values, name, result, spec));
  };
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].list) {
      add(fields[i].name, specs[i]);
    } else {
      for (const TensorSpec& spec : *specs[i].list) add(fields[i].name, spec);
    }
  }
  return results;
}

}  // namespace transformer_ops
