#include "executor/host_results.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "executor/saved.h"
#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/planner.h"
#include "op/dtype.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

// A number stands for each symbolic size, the same one for the same symbol: comparing symbols would
// add guards to the trace. Ops split sizes into equal parts, so that the numbers have many
// divisors.
NativeResults::Sizes sizes_of(at::TensorList arguments, at::TensorList parameters) {
  constexpr int64_t kManyDivisors = 240;
  NativeResults::Sizes found;
  std::vector<std::string> symbols;
  const auto number_of = [&](const c10::SymInt& size) {
    const std::optional<int64_t> known = size.maybe_as_int();
    if (known) return *known;
    found.has_symbols = true;
    const std::string symbol = size.toSymNodeImplUnowned()->str();
    const auto place = std::ranges::find(symbols, symbol) - symbols.begin();
    if (place == std::ssize(symbols)) symbols.push_back(symbol);
    return kManyDivisors * (place + 1);
  };
  for (const at::TensorList tensors : {arguments, parameters}) {
    for (const at::Tensor& tensor : tensors) {
      std::vector<int64_t>& sizes = found.list.emplace_back();
      if (!tensor.defined()) continue;
      for (const c10::SymInt& size : tensor.sym_sizes()) sizes.push_back(number_of(size));
    }
  }
  return found;
}

// The tensors as numbers: dtype, number of sizes, sizes; -1 for none.
std::vector<int64_t> key_of(at::TensorList arguments, at::TensorList parameters,
                            const NativeResults::Sizes& sizes) {
  std::vector<int64_t> key = {sizes.has_symbols};
  auto next = sizes.list.begin();
  for (const at::TensorList tensors : {arguments, parameters}) {
    for (const at::Tensor& tensor : tensors) {
      const std::vector<int64_t>& own = *next++;
      if (!tensor.defined()) {
        key.push_back(-1);
        continue;
      }
      key.push_back(static_cast<int64_t>(tensor.scalar_type()));
      key.push_back(std::ssize(own));
      key.insert(key.end(), own.begin(), own.end());
    }
  }
  return key;
}

std::string text_of(const NativeResults::Row& row) {
  const std::string shape = row.has_symbols
                                ? std::to_string(row.sizes.size()) + " dimensions"
                                : "shape " + shape_text(c10::fromIntArrayRefSlow(row.sizes));
  return shape + " and dtype " + dtype_text(row.dtype);
}

// What the method must do, as far as the rule: "return an output", "save slot 'rstd' of op 0
// (...)".
std::string verb_of(const Plan& plan, const Value& value) {
  if (value.kind == Kind::Main) return "return an output";
  const std::string op =
      " of op " + std::to_string(value.op) + " (" + plan.ops[value.op].kind + ")";
  if (value.kind == Kind::Slot) return "save slot '" + value.name + "'" + op;
  return "return extra output '" + value.name + "'" + op;
}

}  // namespace

std::shared_ptr<NativeResults> NativeResults::of(const Plan& plan, const Step& step) {
  auto found = std::make_shared<NativeResults>();
  found->first_ = step.first();
  found->key_ = {.grad_enabled = true, .autocast = plan.autocast};
  const auto is_quantized = [&](const Value& value) {
    return value.part != Value::Part::Whole && value.op >= step.first() && value.op <= step.last();
  };
  if (std::ranges::any_of(plan.parameters, is_quantized)) return nullptr;
  for (const int i : step.ops) {
    const PlannedOp& planned = plan.ops[i];
    if (!planned.native) return nullptr;
    const OpDeclaration& row = declaration(planned.kind);
    Attributes attributes = planned.attributes;
    for (const State& state : row.states) {
      if (attributes.contains(state.attribute)) attributes[state.attribute] = false;
    }
    for (const std::string& flag : row.flags) attributes.erase(flag);
    OpNode op = make_op(planned.kind, std::move(attributes));
    op.extra_inputs = planned.extra_inputs;
    op.sources.resize(op.extra_inputs.size());
    for (const auto& [input, output] : plan.routes) {
      if (input.op != i || output.op < step.first()) continue;
      op.sources[position_of(op.extra_inputs, input.name)] = {
          output.op - step.first(), position_of(plan.ops[output.op].extra_outputs, output.name)};
    }
    found->key_.training.push_back(planned.training);
    found->ops_.push_back(std::move(op));
  }
  return found;
}

std::vector<Value> NativeResults::parameters() const {
  std::vector<Value> values;
  for (int i = 0; i < std::ssize(ops_); ++i) {
    for (const std::string& name : ops_[i].parameters) {
      values.push_back({Kind::Parameter, first_ + i, name});
    }
  }
  return values;
}

const Program& NativeResults::program_for(at::TensorList arguments, at::TensorList parameters) {
  std::vector<TensorMeta> metas;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      metas.push_back({.is_absent = true});
      return;
    }
    const bool has_gradient = at::isFloatingType(tensor.scalar_type());
    metas.push_back({.dtype = to_dtype(tensor.scalar_type()), .requires_grad = has_gradient});
  };
  add(arguments[0]);
  size_t next = 1;
  for (const OpNode& op : ops_) {
    for (size_t k = 0; k < op.extra_inputs.size(); ++k, ++next) {
      if (!op.sources[k]) add(arguments[next]);
    }
  }
  std::ranges::for_each(parameters, add);
  if (program_ && metas == metas_) return *program_;
  Rewritten groups;
  for (int i = 0; i < std::ssize(ops_); ++i) {
    groups.forward.push_back({.first = i, .name = ops_[i].kind});
  }
  groups.backward = groups.forward;
  key_.tensors = metas;
  program_ = compile(lower(Analysis(ops_, key_), groups));
  metas_ = std::move(metas);
  return *program_;
}

NativeResults::Rows NativeResults::run_on_meta(at::TensorList arguments, at::TensorList parameters,
                                               const Sizes& sizes) {
  const Program& program = program_for(arguments, parameters);
  Tensors tensors;
  auto next = sizes.list.begin();
  const auto add = [&](const at::Tensor& tensor) {
    const std::vector<int64_t>& own = *next++;
    if (!tensor.defined()) return;
    const auto options = at::TensorOptions(tensor.scalar_type()).device(at::kMeta);
    tensors.push_back(at::empty(own, options));
  };
  std::ranges::for_each(arguments, add);
  std::ranges::for_each(parameters, add);
  const Tensors values = transformer_ops::run_on_meta(program, tensors);
  Rows rows;
  const auto note = [&](Value name, int value) {
    const at::Tensor& found = value < 0 ? at::Tensor() : values[value];
    if (!found.defined()) return;
    name.op += first_;
    rows[name] = {found.sizes().vec(), found.scalar_type(), sizes.has_symbols};
  };
  note({Kind::Main, program.plan.size()}, program.outputs[0]);
  for (size_t i = 0; i < program.plan.extra_outputs.size(); ++i) {
    note(program.plan.extra_outputs[i], program.outputs[i + 1]);
  }
  for (const auto& [slot, position] : program.saved_slots) {
    if (slot.kind == Kind::Slot) note(slot, program.saved[position]);
  }
  return rows;
}

std::shared_ptr<const NativeResults::Rows> NativeResults::find(at::TensorList arguments,
                                                               at::TensorList parameters) {
  static const auto& none = *new std::shared_ptr<const Rows>(std::make_shared<Rows>());
  const Sizes sizes = sizes_of(arguments, parameters);
  std::vector<int64_t> key = key_of(arguments, parameters, sizes);
  const std::lock_guard lock(mutex_);
  if (last_ && key == last_key_) return last_;
  try {
    last_ = std::make_shared<Rows>(run_on_meta(arguments, parameters, sizes));
  } catch (const PlanError&) {
    last_ = none;
  } catch (const c10::Error&) {
    last_ = none;
  }
  last_key_ = std::move(key);
  return last_;
}

void check_count(const std::string& step, size_t count, const Tensors& results) {
  TORCH_CHECK(results.size() == count, "[", step, "] a step must return ", count, " tensors, got ",
              results.size());
}

void check_results(const Plan& plan, const Program::HostForward& call, at::TensorList arguments,
                   at::TensorList parameters, HostCall& host, Tensors& results) {
  check_count(call.name, call.results.size(), results);
  const auto refuse = [&](const Value& value, const std::string& rule, const std::string& got) {
    const std::string method = host.forward_method(call.step, value.kind == Kind::Slot);
    TORCH_CHECK(false, method, " must ", verb_of(plan, value), " ", rule, ", got ", got);
  };
  const auto rows = call.native ? call.native->find(arguments, parameters) : nullptr;
  const at::Device device = arguments[0].device();
  for (size_t i = 0; i < results.size(); ++i) {
    at::Tensor& result = results[i];
    if (!result.defined()) continue;
    const Value& name = call.names[i];
    const std::string fault = fault_of(result);
    if (!fault.empty()) refuse(name, "that is a dense tensor with memory", fault);
    if (name.kind == Kind::Main && result.device() != device) {
      refuse(name, "on device " + device.str(), result.device().str());
    }
    const auto row = rows ? rows->find(name) : NativeResults::Rows::const_iterator();
    if (!rows || row == rows->end()) continue;
    const auto& [sizes, dtype, has_symbols] = row->second;
    const at::ScalarType got = result.scalar_type();
    const bool is_parameter =
        name.kind == Kind::Slot && declaration(plan.ops[name.op].kind).has_parameter(name.name);
    const bool has_shape = has_symbols ? result.dim() == std::ssize(sizes)
                                       : result.sym_sizes().equals(c10::fromIntArrayRefSlow(sizes));
    // The op's own backward casts its parameter.
    const bool has_dtype = got == dtype || (is_parameter && at::isFloatingType(got));
    const bool is_wider = plan.autocast && got == at::kFloat && dtype == to_torch(*plan.autocast);
    if (!has_shape || !(has_dtype || is_wider)) {
      refuse(name, "with " + text_of(row->second),
             "shape " + shape_text(result.sym_sizes()) + " and dtype " + dtype_text(got));
    }
    if (!has_dtype) result = result.to(dtype);
  }
}

}  // namespace transformer_ops
