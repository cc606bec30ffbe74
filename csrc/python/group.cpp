#include "python/group.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "executor/run.h"
#include "fuser/declaration.h"

namespace transformer_ops::python {
namespace {

// The key: grad, device, autocast dtype, then one byte a tensor, then one a training flag. A
// tensor's byte holds its dtype and, where gradients are on, whether it requires one.
constexpr size_t kHeader = 3;
constexpr char kRequiresGrad = 64;
constexpr char kNoAutocast = 63;

char tensor_code(at::ScalarType dtype, bool requires_grad) {
  return static_cast<char>(static_cast<char>(dtype) | (requires_grad ? kRequiresGrad : 0));
}

TensorFacts facts_from(char code) {
  const auto dtype = static_cast<at::ScalarType>(code & ~kRequiresGrad);
  return {to_dtype(dtype), (code & kRequiresGrad) != 0};
}

Attribute attribute_from(const py::handle& value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  return value.cast<std::vector<int64_t>>();
}

Attributes attributes_from(const py::handle& values) {
  Attributes attributes;
  for (const auto& [name, value] : py::cast<py::dict>(values)) {
    attributes[name.cast<std::string>()] = attribute_from(value);
  }
  return attributes;
}

OpNode node_from(const py::handle& row) {
  const auto tuple = py::cast<py::tuple>(row);
  OpNode op{.kind = tuple[0].cast<std::string>()};
  op.attributes = attributes_from(tuple[1]);
  op.native = tuple[2].cast<bool>();
  for (const auto& source : py::cast<py::list>(tuple[3])) {
    op.sources.emplace_back();
    if (source.is_none()) continue;
    const auto pair = py::cast<py::tuple>(source);
    op.sources.back() = {pair[0].cast<int>(), pair[1].cast<int>()};
  }
  op.visible = tuple[4].cast<std::vector<bool>>();
  op.extra_inputs = static_cast<int>(op.sources.size());
  op.extra_outputs = static_cast<int>(op.visible.size());
  return op;
}

// Groups travel to Python as (first, count, Python object number or None, name, made by a rule?,
// joint?) and back as the first four.
py::list rewrite_groups_to_python(const std::vector<transformer_ops::Group>& groups) {
  py::list list;
  for (const auto& group : groups) {
    list.append(py::make_tuple(group.first, group.count,
                               group.python ? py::object(py::int_(*group.python)) : py::none(),
                               group.name, group.rule != nullptr, group.joint));
  }
  return list;
}

// `before` supplies what only C++ knows of a group that the function left as it was.
std::vector<transformer_ops::Group> rewrite_groups_from_python(
    const py::list& list, const std::vector<transformer_ops::Group>& before) {
  std::vector<transformer_ops::Group> groups;
  for (const auto& row : list) {
    const auto tuple = py::cast<py::tuple>(row);
    const int first = tuple[0].cast<int>();
    if (first < 0) {
      groups.push_back(before[tuple[1].cast<size_t>()]);
    } else {
      groups.push_back({.first = first,
                        .count = tuple[1].cast<int>(),
                        .python = tuple[2].cast<std::optional<int>>(),
                        .name = tuple[3].cast<std::string>()});
    }
  }
  return groups;
}

// Plans that a group keeps: more than the modes, dtypes and frozen parameters that alternate.
constexpr size_t kCachedPlans = 64;

// A tensor whose class wants to see the calls that it takes part in. Modes are left to torch's ops.
bool has_torch_function(PyObject* tensor) {
  if (THPVariable_CheckTypeExact(Py_TYPE(tensor))) return false;
  static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
  static const py::object& disabled =
      *new py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl"));
  using at::impl::PythonTorchFunctionTLS;
  if (PythonTorchFunctionTLS::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED)
    return false;
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), name));
  if (!found) PyErr_Clear();
  return found && !found.is(disabled);
}

// A tensor that C++ can take.
bool is_plain_tensor(PyObject* object) {
  return THPVariable_Check(object) && !has_torch_function(object);
}

// `module`: its __dict__ where that has the flag.
bool is_training(const py::object& module) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  if (PyDict_CheckExact(module.ptr())) return PyDict_GetItem(module.ptr(), training) == Py_True;
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), training));
  if (!found) throw py::error_already_set();
  return PyObject_IsTrue(found.ptr()) == 1;
}

PyObject* wrap(const Tensors& outputs) {
  if (outputs.size() == 1) return THPVariable_Wrap(outputs[0]);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(outputs.size()));
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), THPVariable_Wrap(outputs[i]));
  }
  return tuple;
}

}  // namespace

Group::Group(const py::list& ops, const py::list& places, const py::list& modules,
             const py::list& hooked, const py::list& absent, py::object new_session, bool recompute)
    : new_session_(std::move(new_session)), recompute_(recompute) {
  for (size_t i = 0; i < ops.size(); ++i) {
    OpNode op = node_from(ops[i]);
    const auto rows = py::cast<py::list>(places[i]);
    op.parameters = static_cast<int>(rows.size());
    for (const auto& row : rows) {
      const auto pair = py::cast<py::tuple>(row);
      if (py::isinstance<py::int_>(pair[1])) {
        op.parameters = pair[1].cast<int>();
        places_.push_back({pair[0], py::none(), py::str(""), static_cast<size_t>(op.parameters)});
      } else {
        places_.push_back({pair[0], pair[0].attr("_parameters"), py::str(pair[1])});
      }
    }
    for (const auto& source : op.sources) extra_inputs_ += source ? 0 : 1;
    if (op.native && declaration(op.kind).inactive) asks_training_.push_back(static_cast<int>(i));
    ops_.push_back(std::move(op));
  }
  for (const auto& row : absent) {
    const auto pair = py::cast<py::tuple>(row);
    absent_.push_back({pair[0], pair[0].attr("_parameters"), py::str(pair[1])});
  }
  for (const auto& module : modules) {
    // A class may compute the flag.
    const bool is_computed = py::hasattr(py::type::of(module), "training");
    modules_.push_back(is_computed ? py::reinterpret_borrow<py::object>(module)
                                   : py::object(module.attr("__dict__")));
  }
  for (const auto& module : hooked) {
    for (const char* name :
         {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}) {
      hook_dicts_.push_back(module.attr(name));
    }
  }
}

bool Group::has_hooks() const {
  for (const auto& dict : hook_dicts_) {
    if (PyDict_Size(dict.ptr()) > 0) return true;
  }
  return false;
}

void Group::check_absent() const {
  for (const auto& place : absent_) {
    const PyObject* found = PyDict_GetItem(place.parameters.ptr(), place.name.ptr());
    TORCH_CHECK(found == nullptr || found == Py_None, "[", Py_TYPE(place.owner.ptr())->tp_name,
                "] ", std::string(place.name),
                " must be assigned to the module after a call without one, ",
                "got a tensor that was put in its place (torch.func.functional_call)");
  }
}

bool Group::gather(PyObject* const* arguments, Py_ssize_t count, Tensors& tensors) const {
  if (count != static_cast<Py_ssize_t>(1 + extra_inputs_)) return false;
  check_absent();
  tensors.reserve(count + places_.size());
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_plain_tensor(arguments[i])) return false;
    tensors.push_back(THPVariable_Unpack(arguments[i]));
  }
  for (const auto& place : places_) {
    if (place.parameters.is_none()) {
      const auto found = py::cast<py::sequence>(place.owner.attr("_parameter_tensors")());
      if (found.size() != place.count) return false;
      for (const auto& tensor : found) {
        if (!is_plain_tensor(tensor.ptr())) return false;
        tensors.push_back(THPVariable_Unpack(tensor.ptr()));
      }
      continue;
    }
    PyObject* found = PyDict_GetItem(place.parameters.ptr(), place.name.ptr());
    py::object attribute;
    if (found == nullptr) {
      // A parametrized parameter, or a plain tensor set in its place.
      attribute = place.owner.attr(place.name);
      found = attribute.ptr();
    }
    if (!is_plain_tensor(found)) return false;
    tensors.push_back(THPVariable_Unpack(found));
  }
  return true;
}

void Group::note_inputs(const Tensors& tensors) {
  last_inputs_.resize(1 + extra_inputs_);
  for (size_t i = 0; i < last_inputs_.size(); ++i) {
    if (tensors[i].unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      last_inputs_.clear();
      return;
    }
    const at::IntArrayRef sizes = tensors[i].sizes();
    last_inputs_[i].sizes.assign(sizes.begin(), sizes.end());
    last_inputs_[i].dtype = tensors[i].scalar_type();
  }
}

py::list Group::last_inputs() const {
  py::list list;
  for (const auto& [sizes, dtype] : last_inputs_) {
    list.append(py::make_tuple(std::vector<int64_t>(sizes.begin(), sizes.end()), dtype));
  }
  return list;
}

void Group::write_key(const Tensors& tensors) {
  const bool grad = at::GradMode::is_enabled();
  const auto device = tensors[0].device().type();
  // The meta device, for one, has none.
  const bool autocast =
      at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  scratch_key_.clear();
  scratch_key_ += static_cast<char>(grad);
  scratch_key_ += static_cast<char>(device);
  scratch_key_ +=
      autocast ? static_cast<char>(at::autocast::get_autocast_dtype(device)) : kNoAutocast;
  for (const Tensor& tensor : tensors) {
    scratch_key_ += tensor_code(tensor.scalar_type(), grad && tensor.requires_grad());
  }
  for (const int op : asks_training_) {
    scratch_key_ += static_cast<char>(is_training(modules_[op]));
  }
}

Facts Group::facts_of(const std::string& key) const {
  Facts facts{.grad_enabled = key[0] != 0, .recompute = recompute_};
  if (key[2] != kNoAutocast) facts.autocast = to_dtype(static_cast<at::ScalarType>(key[2]));
  size_t next = kHeader;
  facts.input = facts_from(key[next++]);
  for (size_t i = 0; i < extra_inputs_; ++i) facts.extra_inputs.push_back(facts_from(key[next++]));
  for (const OpNode& op : ops_) {
    facts.parameters.emplace_back();
    for (int k = 0; k < op.parameters; ++k) {
      facts.parameters.back().push_back(facts_from(key[next++]));
    }
  }
  facts.training.assign(ops_.size(), false);
  for (const int op : asks_training_) facts.training[op] = key[next++] != 0;
  return facts;
}

bool Group::is_current(const PlanEntry& entry) const {
  return entry.version == registry_version() && entry.generation == generation_;
}

void Group::forget_plans() {
  ++generation_;
  // Moved out first: what dies may call back.
  const auto entries = std::exchange(entries_, {});
}

std::shared_ptr<PlanEntry> Group::find_or_make(const std::string& key) {
  const int64_t version = registry_version(), generation = generation_;
  if (version != version_) {
    entries_.clear();
    version_ = version;
  }
  for (const auto& entry : entries_) {
    if (entry->key == key) return entry;
  }
  py::object session = new_session_();
  const auto attributes = py::cast<py::list>(session.attr("attributes")());
  // A copy: planning calls Python, and another thread may plan meanwhile.
  std::vector<OpNode> ops = ops_;
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].native) ops[i].attributes = attributes_from(attributes[i]);
  }
  const auto rewrite = [&](const Fusion& fusion,
                           const std::vector<transformer_ops::Group>& groups) {
    const py::list answer =
        session.attr("rewrite")(fusion.id, to_text(fusion.pass), rewrite_groups_to_python(groups));
    return rewrite_groups_from_python(answer, groups);
  };
  Planned planned = make_plan(ops, facts_of(key), rewrite);
  auto entry = std::make_shared<PlanEntry>();
  entry->key = key;
  entry->version = version;
  entry->generation = generation;
  entry->plan = std::move(planned.plan);
  entry->near_misses = std::move(planned.near_misses);
  std::vector<int> extra_outputs;
  for (const OpNode& op : ops) extra_outputs.push_back(op.extra_outputs);
  entry->handle = std::make_shared<ProgramHandle>(share(compile(entry->plan, extra_outputs)));
  entry->session = std::move(session);
  const Program& program = *entry->handle->program;
  entry->needs_host = program.has_host_steps || program.accumulates;
  if (entry->needs_host) entry->host = entry->session.attr("make_host")(entry);
  if (version == version_ && generation == generation_) entries_.push_back(entry);
  if (entries_.size() > kCachedPlans) entries_.erase(entries_.begin());
  return entry;
}

std::shared_ptr<PlanEntry> Group::plan(bool grad, std::optional<at::ScalarType> autocast,
                                       const std::string& device,
                                       const std::vector<std::pair<at::ScalarType, bool>>& tensors,
                                       const std::vector<bool>& training) {
  std::string key;
  key += static_cast<char>(grad);
  key += static_cast<char>(c10::Device(device).type());
  key += autocast ? static_cast<char>(*autocast) : kNoAutocast;
  for (const auto& [dtype, requires_grad] : tensors) {
    key += tensor_code(dtype, grad && requires_grad);
  }
  for (const int op : asks_training_) key += static_cast<char>(training[op]);
  last_ = find_or_make(key);
  last_inputs_.clear();
  return last_;
}

PyObject* Group::call(PyObject* const* arguments, Py_ssize_t count, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  Tensors tensors;
  if (is_cleared_ || has_hooks() || !gather(arguments, count, tensors)) Py_RETURN_NONE;
  write_key(tensors);
  // The version of the entry: a plan that could not be made leaves the stale one in place.
  if (!last_ || !is_current(*last_) || last_->key != scratch_key_) {
    // A copy: planning calls Python, and another thread may write its key meanwhile.
    const std::shared_ptr<PlanEntry> entry = find_or_make(std::string(scratch_key_));
    last_ = entry;
  }
  // Its own: meanwhile another thread may plan again.
  const std::shared_ptr<PlanEntry> entry = last_;
  SharedHostCall host;
  if (entry->needs_host) {
    const auto given = kwargs != nullptr ? py::reinterpret_borrow<py::object>(kwargs) : py::none();
    host = make_host_call(entry->handle, entry->host.attr("start")(given), tensors[0]);
  }
  note_inputs(tensors);
  Tensors outputs;
  {
    const py::gil_scoped_release no_gil;
    outputs = run(entry->handle->program, tensors, host);
  }
  return wrap(outputs);
  END_HANDLE_TH_ERRORS
}

int Group::traverse(visitproc visit, void* arg) const {
  for (const auto& place : places_) {
    Py_VISIT(place.owner.ptr());
    Py_VISIT(place.parameters.ptr());
  }
  for (const auto& place : absent_) {
    Py_VISIT(place.owner.ptr());
    Py_VISIT(place.parameters.ptr());
  }
  for (const auto& module : modules_) Py_VISIT(module.ptr());
  for (const auto& dict : hook_dicts_) Py_VISIT(dict.ptr());
  Py_VISIT(new_session_.ptr());
  const auto visit_session = [&](const std::shared_ptr<PlanEntry>& entry, long owners) {
    // Held by Python too: reachable from there.
    if (entry.use_count() != owners) return 0;
    Py_VISIT(entry->session.ptr());
    Py_VISIT(entry->host.ptr());
    return 0;
  };
  for (const auto& entry : entries_) {
    if (const int stop = visit_session(entry, entry == last_ ? 2 : 1)) return stop;
  }
  const bool is_cached = std::ranges::find(entries_, last_) != entries_.end();
  return last_ && !is_cached ? visit_session(last_, 1) : 0;
}

void Group::clear() {
  // Moved out first: what dies may call back.
  const auto places = std::exchange(places_, {});
  const auto absent = std::exchange(absent_, {});
  const auto modules = std::exchange(modules_, {});
  const auto hook_dicts = std::exchange(hook_dicts_, {});
  const auto entries = std::exchange(entries_, {});
  const auto last = std::exchange(last_, nullptr);
  const auto new_session = std::exchange(new_session_, py::none());
  is_cleared_ = true;
}

namespace {

// Null before its __init__ has run.
Group* group_of(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  const auto holder = instance->get_value_and_holder();
  return holder.holder_constructed() ? holder.value_ptr<Group>() : nullptr;
}

int traverse_group(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Group* const group = group_of(self);
  return group != nullptr ? group->traverse(visit, arg) : 0;
}

int clear_group(PyObject* self) {
  if (Group* const group = group_of(self)) group->clear();
  return 0;
}

void make_collectable(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = traverse_group;
  type->ht_type.tp_clear = clear_group;
}

PyObject* call_group(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return group_of(self)->call(arguments, count, nullptr);
}

PyObject* call_group_with(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return group_of(self)->call(arguments + 1, count - 1, arguments[0]);
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastCall function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

PyMethodDef call_method = method("call", call_group);
PyMethodDef call_with_method = method("call_with", call_group_with);

// A built-in function bound to the group: a fifth of the cost of a pybind11 call.
py::object make_call(PyMethodDef& method, const py::object& group) {
  auto call = py::reinterpret_steal<py::object>(PyCFunction_New(&method, group.ptr()));
  if (!call) throw py::error_already_set();
  return call;
}

py::object value_to_python(const Argument& argument) {
  if (const auto* value = std::get_if<Value>(&argument)) return py::str(to_text(*value));
  if (const auto* constant = std::get_if<Attribute>(&argument)) {
    return py::make_tuple(std::visit([](const auto& item) { return py::cast(item); }, *constant));
  }
  return py::none();
}

py::object dtype_to_python(const std::optional<DType>& dtype) {
  return dtype ? py::object(py::str(to_text(*dtype))) : py::none();
}

py::dict step_to_python(const Step& step) {
  py::list instructions, saves;
  for (const Instruction& instruction : step.instructions) {
    py::list arguments, results;
    for (const Argument& argument : instruction.arguments) {
      arguments.append(value_to_python(argument));
    }
    for (const Value& result : instruction.results) results.append(to_text(result));
    instructions.append(py::make_tuple(instruction.target, arguments, results));
  }
  for (const Save& save : step.saves) {
    saves.append(py::make_tuple(to_text(save.slot), to_text(save.source)));
  }
  py::dict row;
  row["name"] = step.name;
  row["ops"] = step.ops;
  row["instructions"] = instructions;
  row["saves"] = saves;
  row["compute"] = dtype_to_python(step.compute);
  row["cast_parameters"] = step.cast_parameters;
  row["result"] = dtype_to_python(step.result);
  row["python"] = step.python ? py::object(py::int_(*step.python)) : py::none();
  row["joint"] = step.joint;
  row["skipped"] = step.skipped;
  return row;
}

py::list values_to_python(const std::vector<Value>& values) {
  py::list list;
  for (const Value& value : values) list.append(to_text(value));
  return list;
}

// (op, position) of an extra tensor.
py::tuple position_of(const Value& value) {
  return py::make_tuple(value.op, std::stoi(value.name));
}

// A plan as plain Python data: what Python steps and explain() read.
py::dict plan_to_python(const Plan& plan) {
  py::dict data;
  py::list ops, forward, backward, routes;
  for (const PlannedOp& op : plan.ops) {
    py::dict attributes;
    for (const auto& [name, value] : op.attributes) {
      attributes[py::str(name)] =
          std::visit([](const auto& item) { return py::cast(item); }, value);
    }
    ops.append(py::make_tuple(op.kind, attributes, op.native));
  }
  for (const Step& step : plan.forward) forward.append(step_to_python(step));
  for (const Step& step : plan.backward) backward.append(step_to_python(step));
  for (const Route& route : plan.routes) {
    routes.append(py::make_tuple(to_text(route.input), to_text(route.output)));
  }
  data["ops"] = ops;
  data["extra_inputs"] = values_to_python(plan.extra_inputs);
  data["parameters"] = values_to_python(plan.parameters);
  data["extra_outputs"] = values_to_python(plan.extra_outputs);
  std::vector<std::vector<std::string>> parameters(plan.ops.size());
  for (const Value& value : plan.parameters) parameters[value.op].push_back(value.name);
  std::vector<bool> wants_parameters(plan.ops.size());
  for (const Value& value : plan.gradients) {
    if (value.kind == Value::Kind::ParameterGrad) wants_parameters[value.op] = true;
  }
  py::dict fed_by;
  for (const Route& route : plan.routes)
    fed_by[position_of(route.input)] = position_of(route.output);
  py::list visible;
  for (const Value& value : plan.extra_outputs) visible.append(position_of(value));
  data["parameter_names"] = parameters;
  data["wants_parameters"] = wants_parameters;
  data["fed_by"] = fed_by;
  data["visible"] = visible;
  data["routes"] = routes;
  data["first_backward"] = plan.first_backward;
  data["autocast"] = dtype_to_python(plan.autocast);
  data["forward"] = forward;
  data["backward"] = backward;
  return data;
}

py::list near_misses_to_python(const std::vector<NearMiss>& near_misses) {
  py::list list;
  for (const NearMiss& miss : near_misses) {
    list.append(py::make_tuple(miss.fusion, to_text(miss.pass), miss.ops, miss.reason));
  }
  return list;
}

}  // namespace

void bind_group(py::module_& module) {
  py::class_<PlanEntry, std::shared_ptr<PlanEntry>>(module, "PlanEntry", py::dynamic_attr())
      .def_property_readonly("text", [](const PlanEntry& entry) { return to_text(entry.plan); })
      .def_property_readonly("data",
                             [](const PlanEntry& entry) { return plan_to_python(entry.plan); })
      .def_property_readonly(
          "near_misses",
          [](const PlanEntry& entry) { return near_misses_to_python(entry.near_misses); })
      .def_property_readonly("native", [](const PlanEntry& entry) { return !entry.needs_host; })
      .def_readonly("program", &PlanEntry::handle)
      .def_readonly("host", &PlanEntry::host)
      .def_readonly("session", &PlanEntry::session);
  py::class_<Group, std::shared_ptr<Group>>(module, "Group",
                                            py::custom_type_setup(make_collectable))
      .def(py::init<py::list, py::list, py::list, py::list, py::list, py::object, bool>())
      .def("forget_plans", &Group::forget_plans)
      .def("check_absent", torch::wrap_pybind_function(&Group::check_absent))
      .def(
          "make_call", [](const py::object& group) { return make_call(call_method, group); },
          "The eager call: (input, *extra_inputs).")
      .def(
          "make_call_with",
          [](const py::object& group) { return make_call(call_with_method, group); },
          "The same with a dict of keyword arguments for each basic op: (kwargs, input, "
          "*extra_inputs).")
      .def("plan", torch::wrap_pybind_function(&Group::plan))
      .def_property_readonly("last", &Group::last)
      .def_property_readonly("last_inputs", &Group::last_inputs)
      .def_property_readonly("cached_plans", &Group::cached_plans);
  module.def("parse_plan", torch::wrap_pybind_function([](const std::string& text) {
               const Plan plan = parse_plan(text);
               check_calls(plan);
               return py::make_tuple(to_text(plan), plan_to_python(plan));
             }));
}

}  // namespace transformer_ops::python
