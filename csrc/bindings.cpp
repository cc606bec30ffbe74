// transformer_ops._C: the fuser for Python.
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "executor/frozen_weights.h"
#include "executor/program.h"
#include "fuser/declaration.h"
#include "fuser/registry.h"
#include "kernels/cpu.h"
#include "kernels/format.h"
#include "op/buffer.h"
#include "op/decomposition.h"
#include "op/flops.h"
#include "op/run_call.h"
#include "op/torch_library.h"
#include "op/typed_op.h"
#include "python/group.h"
#include "python/guards.h"

// A copy of the declaration in torch/csrc/jit/python/pybind_utils.h, which would double the compile
// time of this file.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> length);
}

namespace transformer_ops::python {
namespace {

Pass pass_from(const std::string& name) {
  for (const Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    if (name == to_text(pass)) return pass;
  }
  throw py::value_error("[fusion] pass must be forward, backward or forward_backward, got " + name);
}

py::list list_fusions() {
  py::list rows;
  for (const Fusion& fusion : fusions()) {
    rows.append(py::make_tuple(fusion.id, fusion.name, to_text(fusion.pass), fusion.origin,
                               fusion.rule != nullptr));
  }
  return rows;
}

py::dict declaration_to_python(const OpDeclaration& row) {
  py::list slots, needed_for, when;
  for (const Slot& slot : row.slots) {
    slots.append(slot.name);
    needed_for.append(slot.needed_for);
    when.append(slot.when ? slot.when->attribute + "=" + to_text(slot.when->value) : "");
  }
  py::dict entry;
  entry["kind"] = row.kind;
  entry["summary"] = row.summary;
  entry["parameters"] = row.parameters;
  std::map<std::string, std::pair<std::string, std::string>> lists;
  for (const ListedParameter& list : row.lists) lists[list.parameter] = {list.count, list.single};
  entry["lists"] = lists;
  entry["attributes"] = row.attributes;
  entry["flags"] = row.flags;
  py::dict types;  // of the attributes that a typed op takes
  for (const Schema* schema : {&row.backward_schema, &row.forward_schema}) {
    for (const auto& [type, name, _] : schema->arguments) {
      if (row.has_attribute(name)) types[py::str(name)] = type;
    }
  }
  entry["attribute_types"] = types;
  entry["extra_inputs"] = row.extra_inputs;
  entry["extra_outputs"] = row.extra_outputs;
  entry["integers"] = row.integers;
  entry["constants"] = row.constants;
  entry["detached"] = row.detached;
  entry["operands"] = row.exact_operands ? std::vector<std::string>() : row.operands;
  std::vector<std::string> optional;
  for (const auto* names : {&row.parameters, &row.extra_inputs}) {
    std::ranges::copy_if(*names, std::back_inserter(optional),
                         [&](const std::string& name) { return row.is_optional(name); });
  }
  entry["optional"] = optional;
  entry["slots"] = slots;
  // For the states that take a gradient: (the attribute that enables it, is it computed later?).
  std::vector<std::pair<std::string, bool>> states;
  for (const State& state : row.states) states.emplace_back(state.attribute, state.later);
  entry["states"] = states;
  entry["needed_for"] = needed_for;
  entry["when"] = when;
  entry["keeps_width"] = !row.width;
  entry["asks_training"] = row.asks_training();
  entry["forward"] = row.forward;
  entry["backward"] = row.backward;
  return entry;
}

py::list list_declarations() {
  py::list rows;
  for (const auto& [kind, row] : declarations()) rows.append(declaration_to_python(row));
  return rows;
}

py::list list_rules() {
  py::list rows;
  for (const Fusion& fusion : fusions()) {
    if (fusion.rule == nullptr) continue;
    py::dict entry;
    entry["name"] = fusion.name;
    entry["pass"] = to_text(fusion.pass);
    entry["origin"] = fusion.origin;
    entry["benefit"] = fusion.rule->benefit;
    py::list pattern, optional;
    for (const PatternOp& op : fusion.rule->pattern) {
      pattern.append(op.kinds);
      optional.append(op.optional);
    }
    entry["pattern"] = pattern;
    entry["optional"] = optional;
    entry["forward"] = fusion.rule->forward;
    entry["backward"] = fusion.rule->backward;
    rows.append(entry);
  }
  return rows;
}

py::list list_typed_op_pairs() {
  py::list rows;
  for (const auto& pair : typed_op_pairs())
    rows.append(py::make_tuple(pair.forward, pair.backward));
  return rows;
}

py::list list_counted_ops() {
  py::list rows;
  for (const CountedOp& op : counted_ops()) {
    py::list products;
    for (const auto& [matrix, needed_for] : op.products.list) {
      products.append(py::make_tuple(matrix, needed_for));
    }
    rows.append(py::make_tuple(torch_name(op.name), op.results, products, op.products.rows,
                               op.products.rows_are_numbers, op.products.of_heads));
  }
  return rows;
}

// The rows of kernels/format.h, for transformer_ops/quantization/number_format.py.
py::list list_formats() {
  constexpr const char* kElements[] = {"e4m3", "e5m2", "e2m1", "nf4", "int8"};
  constexpr const char* kScales[] = {"float32", "power of two", "e8m0", "e4m3"};
  constexpr const char* kErrors[] = {"", "MAE", "MSE"};
  py::list rows;
  for (const kernel::Format& row : kernel::kFormats) {
    rows.append(py::make_tuple(row.name, kElements[static_cast<size_t>(row.element)],
                               kScales[static_cast<size_t>(row.rule)], row.bits, row.largest,
                               row.block_rows, row.block_columns,
                               kErrors[static_cast<size_t>(row.four_over_six)], row.largest_scale));
  }
  return rows;
}

// The schema, in torch's form, of an op that plans call.
std::string typed_op_schema(const std::string& name) {
  const auto callee = find_callee(name);
  TORCH_CHECK(callee, "[typed op] name must be that of one, got '", name, "'");
  return c10::str(*callee->schema);
}

// The decomposition of a typed op; arguments in schema order.
std::vector<std::optional<at::Tensor>> decomposition(const std::string& name,
                                                     const py::tuple& arguments) {
  const auto callee = find_callee(name);
  TORCH_CHECK(callee, "[decomposition] op must be registered, got '", name, "'");
  const auto& fields = callee->schema->arguments();
  std::vector<c10::IValue> stack;
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(torch::jit::toIValue(arguments[i], fields[i].type(), std::nullopt));
  }
  std::vector<std::optional<at::Tensor>> results;
  Tensors found;
  {
    // The decomposition may run the autograd engine.
    const py::gil_scoped_release no_gil;
    found = call_decomposition(name, stack);
  }
  for (at::Tensor& result : found) {
    results.push_back(result.defined() ? std::optional(std::move(result)) : std::nullopt);
  }
  return results;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  bind_host(module);
  bind_guards(module);
  bind_group(module);
  bind_memory(module);
  bind_allocations(module);
  bind_threads(module);
  bind_listeners(module);
  bind_delayed_scales(module);
  module.def("has_user_fusions", &has_user_fusions,
             "Whether a user's fusion is registered, which may read the training flag of any op.");
  module.def("add_user_fusion",
             [](const std::string& name, const std::string& pass, const std::string& origin,
                bool prepend, const std::vector<std::pair<std::vector<std::string>, bool>>& rows) {
               std::vector<PatternOp> pattern;
               for (const auto& [names, optional] : rows) pattern.emplace_back(names, optional);
               return add_user_fusion(name, pass_from(pass), origin, prepend, std::move(pattern));
             });
  module.def("remove_fusion", &remove_fusion);
  module.def("suspend_fusion", &suspend_fusion);
  module.def("fusions", &list_fusions);
  module.def("registry_version", &registry_version);
  module.def("declarations", &list_declarations);
  module.def("declaration",
             [](const std::string& kind) { return declaration_to_python(declaration(kind)); });
  module.def("rules", &list_rules);
  module.def("constants_of", [](const std::string& forward) {
    const OpDeclaration* const row = find_declaration_of(forward);
    return row == nullptr ? std::vector<std::string>() : row->constants;
  });
  module.def("slot_bits", [](const std::string& kind, const std::string& slot, int64_t width,
                             int64_t element_bits) {
    return slot_bits(declaration(kind), slot, width, element_bits);
  });
  module.def("typed_op_pairs", &list_typed_op_pairs);
  module.def("plan_ops", &plan_ops);
  module.def("formats", &list_formats);
  module.def("typed_op_schema", &typed_op_schema);
  module.def("counted_ops", &list_counted_ops);
  module.def("typed_ops_without_cuda", &typed_ops_without_cuda);
  module.def("decomposition", torch::wrap_pybind_function(&decomposition));
  module.def("write_next_result_into", [](const std::optional<at::Tensor>& buffer) {
    write_next_result_into(buffer.value_or(at::Tensor()));
  });
  module.def("processor_levels", &cpu::processor_levels);
  module.def("processor", [] {
    const cpu::Processor& found = cpu::processor();
    return py::make_tuple(found.level, found.kernels, found.multiplies_bfloat16,
                          found.multiplies_half, found.prefers_onednn);
  });
  module.def("enter_frozen_weights", &FrozenWeights::enter);
  module.def("leave_frozen_weights", torch::wrap_pybind_function(&FrozenWeights::leave));
  module.def("untraced", [](const py::function& method) {
    return py::cpp_function([method](const py::object& self) { return method(self); });
  });
}

}  // namespace transformer_ops::python
