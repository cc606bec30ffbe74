#include "op/run_call.h"

#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "fuser/attribute.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/text.h"
#include "op/batching.h"
#include "op/frame.h"
#include "op/torch_library.h"
#include "op/variant.h"

namespace transformer_ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

c10::IValue constant_of(const std::string& text) {
  if (text == "none") return {};
  return std::visit([](const auto& value) { return c10::IValue(value); }, parse_attribute(text));
}

// The schemas of targets that are not registered with torch, in torch's form.
struct FormSchemas {
  ForkSafeMutex mutex;
  std::map<std::string, c10::FunctionSchema> rows;
};

FormSchemas& form_schemas = *new FormSchemas;

const c10::FunctionSchema& schema_of(const Variant& variant) {
  {
    const std::lock_guard lock(form_schemas.mutex);
    const auto row = form_schemas.rows.find(variant.name);
    if (row != form_schemas.rows.end()) return row->second;
  }
  c10::FunctionSchema schema = torch::jit::parseSchema(variant.schema);
  const std::lock_guard lock(form_schemas.mutex);
  return form_schemas.rows.try_emplace(variant.name, std::move(schema)).first->second;
}

// Returns 2 for "[%, %]", and none for a text that is not a list.
std::optional<size_t> placeholders(const std::string& text) {
  if (!text.starts_with("[%")) return std::nullopt;
  return split_text(text.substr(1, text.size() - 2), ',').size();
}

// A parsed call: its constants, and the positions of its tensors.
class ParsedCall {
 public:
  explicit ParsedCall(const std::string& text) {
    const size_t open = text.find('(');
    const std::string target = text.substr(0, open);
    variant_ = open == std::string::npos || !text.ends_with(')') ? nullptr : find_variant(target);
    TORCH_CHECK(variant_ != nullptr,
                "[run_call] call must read 'op(arguments)' of an op that plans ", "call, got '",
                text, "'");
    try {
      for (const auto& word : split_text(text.substr(open + 1, text.size() - open - 2), ',')) {
        add(word);
      }
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "[run_call] call must have arguments as a plan has them, got '", text,
                  "': ", error.what());
    }
    const c10::FunctionSchema& schema = schema_of(*variant_);
    take_empty_lists(schema);
    TORCH_CHECK(fits(schema), "[run_call] call must fit the schema '", schema, "', got '", text,
                "'");
  }

  const Variant& variant() const { return *variant_; }

  // Pushes the arguments. The list is emptied, so that an op may reuse the memory of a tensor that
  // has no other reference.
  void push(const c10::List<at::Tensor>& tensors, Stack& stack) const {
    TORCH_CHECK(tensors.size() == tensors_, "[run_call] call must have ", tensors_,
                " tensors, got ", tensors.size());
    size_t next = 0;
    for (const Place& place : places_) {
      if (place.list) {
        c10::List<at::Tensor> list;
        for (size_t i = 0; i < *place.list; ++i) list.push_back(tensors.extract(next++));
        stack.emplace_back(std::move(list));
      } else if (place.is_tensor) {
        stack.emplace_back(tensors.extract(next++));
      } else {
        stack.push_back(place.constant);
      }
    }
  }

 private:
  struct Place {
    c10::IValue constant = {};
    bool is_tensor = false;
    std::optional<size_t> list = {};

    c10::TypePtr type() const {
      if (list) return c10::ListType::ofTensors();
      return is_tensor ? c10::TensorType::get() : constant.type();
    }
  };

  bool fits(const c10::FunctionSchema& schema) const {
    const auto& arguments = schema.arguments();
    if (places_.size() != arguments.size()) return false;
    for (size_t i = 0; i < places_.size(); ++i) {
      if (!places_[i].type()->isSubtypeOf(*arguments[i].type())) return false;
    }
    return true;
  }

  // "[]" reads as a list of integers, and may be one of tensors.
  void take_empty_lists(const c10::FunctionSchema& schema) {
    const size_t size = std::min(places_.size(), schema.arguments().size());
    for (size_t i = 0; i < size; ++i) {
      const bool is_tensors = *schema.arguments()[i].type() == *c10::ListType::ofTensors();
      const c10::IValue& constant = places_[i].constant;
      if (is_tensors && constant.isList() && constant.toListRef().empty()) {
        places_[i] = {.list = 0};
      }
    }
  }

  void add(const std::string& word) {
    Place place{.is_tensor = word == "%", .list = placeholders(word)};
    if (!place.is_tensor && !place.list) place.constant = constant_of(word);
    tensors_ += place.list.value_or(place.is_tensor ? 1 : 0);
    places_.push_back(std::move(place));
  }

  const Variant* variant_;
  std::vector<Place> places_;
  size_t tensors_ = 0;
};

// Each text is parsed once.
struct ParsedCalls {
  ForkSafeMutex mutex;
  std::map<std::string, std::shared_ptr<const ParsedCall>, std::less<>> rows;
};
constexpr size_t kMostTexts = 4096;

// It is never deleted, because a thread may run while static objects are destroyed.
ParsedCalls& parsed_calls = *new ParsedCalls;

std::shared_ptr<const ParsedCall> parsed(std::string_view text) {
  {
    const std::lock_guard lock(parsed_calls.mutex);
    const auto row = parsed_calls.rows.find(text);
    if (row != parsed_calls.rows.end()) return row->second;
  }
  auto call = std::make_shared<const ParsedCall>(std::string(text));
  const std::lock_guard lock(parsed_calls.mutex);
  if (parsed_calls.rows.size() >= kMostTexts) parsed_calls.rows.clear();
  return parsed_calls.rows.try_emplace(std::string(text), std::move(call)).first->second;
}

template <KernelKind kind>
void run(const OperatorHandle&, DispatchKeySet, Stack* stack) {
  auto tensors = std::move(stack->back()).toTensorList();
  stack->pop_back();
  const auto call = parsed(stack->back().toStringView());
  stack->pop_back();
  const std::string& name = call->variant().name;
  // The profiler shows the op within run_call.
  RECORD_FUNCTION(torch_name(name), c10::ArrayRef<const c10::IValue>());
  const size_t below = stack->size();
  call->push(tensors, *stack);
  run_kernel(call->variant(), kind, stack);
  c10::List<at::Tensor> results;
  for (size_t i = below; i < stack->size(); ++i) {
    const c10::IValue& result = (*stack)[i];
    if (result.isTensor()) {
      results.push_back(result.toTensor());
    } else {
      for (const at::Tensor& tensor : result.toTensorVector()) results.push_back(tensor);
    }
  }
  stack->resize(below);
  stack->emplace_back(std::move(results));
}

// Ops that draw random numbers have an overload of their own, whose tag keeps compilers from
// merging two calls.
constexpr const char* kRandom = "random";

template <torch::CppFunction (*make)()>
void add(DispatchKey key) {
  for (const auto* const name : {"run_call", "run_call.random"}) {
    torch_library(kRunCall).impl(name, torch::dispatch(key, make()));
  }
}

torch::CppFunction meta() {
  return torch::CppFunction::makeFromBoxedFunction<run<KernelKind::Meta>>();
}
torch::CppFunction cpu() {
  return torch::CppFunction::makeFromBoxedFunction<run<KernelKind::Cpu>>();
}
torch::CppFunction cuda() {
  return torch::CppFunction::makeFromBoxedFunction<run<KernelKind::Cuda>>();
}

// The results require a gradient, and their backward raises.
struct Undifferentiated : torch::autograd::Function<Undifferentiated> {
  static Tensors forward(torch::autograd::AutogradContext* ctx, at::TensorList /*tensors*/,
                         const std::string& op, const OperatorHandle& handle, DispatchKeySet keys,
                         Stack* stack) {
    ctx->saved_data["op"] = op;
    const at::AutoDispatchBelowAutograd below_autograd;
    handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    return stack->back().toTensorVector();
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[run_call] tensors of ",
                                ctx->saved_data["op"].toStringRef(),
                                " must not require a gradient, because none passes through this "
                                "op, got a backward");
  }
};

// Backward in a graph of make_fx calls ops by run_call, also where the graph runs with gradients.
void run_with_gradients(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
  const bool has_tangents = [&] {
    const at::NoGradGuard no_grad;
    return wants_gradient(stack->back());
  }();
  if (has_tangents || !wants_gradient(stack->back())) {
    return refuse_gradients(handle, keys, stack);
  }
  const Tensors tensors = stack->back().toTensorVector();
  const std::string op = parsed(torch::jit::peek(*stack, 0, 2).toStringView())->variant().name;
  const Tensors results = Undifferentiated::apply(at::TensorList(tensors), op, handle, keys, stack);
  stack->back() = results;
}

torch::CppFunction autograd() {
  return torch::CppFunction::makeFromBoxedFunction<run_with_gradients>();
}

[[maybe_unused]] const bool registered = [] {
  torch_library(kRunCall).def("run_call(str call, Tensor[] tensors) -> Tensor[] results",
                              {at::Tag::pt2_compliant_tag});
  torch_library(kRunCall).def("run_call.random(str call, Tensor[] tensors) -> Tensor[] results",
                              {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  add<meta>(DispatchKey::Meta);
  add<cpu>(DispatchKey::CPU);
  add<cuda>(DispatchKey::CUDA);
  for (const DispatchKey key : autograd_keys()) add<autograd>(key);
  add_batching(torch_library(kRunCall), "run_call");
  return true;
}();

}  // namespace

std::optional<Callee> find_callee(const std::string& target) {
  auto& torch_ops = c10::Dispatcher::singleton();
  // torch would take the part after a dot for an overload.
  const bool is_form = target.find('.') != std::string::npos;
  const auto op = is_form ? std::nullopt : torch_ops.findSchema({torch_name(target), ""});
  if (op) return Callee{*op, &op->schema(), false};
  const Variant* const variant = find_variant(target);
  if (variant == nullptr) return std::nullopt;
  static const auto run_call = torch_ops.findSchemaOrThrow(kRunCall, "");
  static const auto run_random_call = torch_ops.findSchemaOrThrow(kRunCall, kRandom);
  return Callee{variant->op.random ? run_random_call : run_call, &schema_of(*variant), true};
}

void add_run_call(c10::DispatchKey key) { add<cuda>(key); }

}  // namespace transformer_ops
