#include "python/group.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "executor/error_text.h"
#include "executor/run.h"
#include "fuser/declaration.h"
#include "op/dtype.h"
#include "python/tensors.h"

namespace transformer_ops::python {
namespace {

Attribute attribute_from(const py::handle& value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  const auto list = py::cast<py::list>(value);
  if (!list.empty() && py::isinstance<py::float_>(list[0]))
    return value.cast<std::vector<double>>();
  return value.cast<std::vector<int64_t>>();
}

Attributes attributes_from(const py::handle& values) {
  Attributes attributes;
  for (const auto& [name, value] : py::cast<py::dict>(values)) {
    attributes[name.cast<std::string>()] = attribute_from(value);
  }
  return attributes;
}

// Sets the names of a native op's extra tensors. The last optional extra inputs may be omitted.
void take_names(const OpDeclaration& row, OpNode& op) {
  const size_t given = op.sources.size(), declared = row.extra_inputs.size();
  bool fits = given <= declared;
  for (size_t i = given; i < declared; ++i) fits &= row.is_optional(row.extra_inputs[i]);
  TORCH_CHECK_VALUE(fits, "[", op.kind, "] num_extra_inputs must be ", row.extra_inputs.size(),
                    ", got ", op.sources.size());
  TORCH_CHECK_VALUE(op.visible.size() == row.extra_outputs.size(), "[", op.kind,
                    "] num_extra_outputs must be ", row.extra_outputs.size(), ", got ",
                    op.visible.size());
  op.extra_inputs.assign(row.extra_inputs.begin(), row.extra_inputs.begin() + given);
  op.extra_outputs = row.extra_outputs;
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
  op.extra_inputs = numbered_names(op.sources.size());
  op.extra_outputs = numbered_names(op.visible.size());
  if (op.native) take_names(declaration(op.kind), op);
  return op;
}

Policies policies_from(const py::tuple& values) {
  return {.recompute = parse_recompute(values[0].cast<std::string>()),
          .saved = {parse_saved_format(values[1].cast<std::string>()), values[2].cast<bool>()}};
}

// Groups are passed to Python as (first, count, Python object number or None, name, made by a
// rule?, joint?) and returned as the first four.
py::list rewrite_groups_to_python(const std::vector<StepGroup>& groups) {
  py::list list;
  for (const auto& group : groups) {
    list.append(py::make_tuple(group.first, group.count,
                               group.python ? py::object(py::int_(*group.python)) : py::none(),
                               group.name, group.rule != nullptr, group.joint));
  }
  return list;
}

// `before` supplies what only C++ knows about a group that the function did not change.
std::vector<StepGroup> rewrite_groups_from_python(const py::list& list,
                                                  const std::vector<StepGroup>& before) {
  std::vector<StepGroup> groups;
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

py::object alive(const py::weakref& reference) {
  py::object found = reference();
  TORCH_CHECK(!found.is_none(), "[OperationFuser] ops must exist, got a freed one");
  return found;
}

bool is_training(const py::object& module, bool is_computed) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  if (!is_computed) {
    const auto own =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
    if (!own) throw py::error_already_set();
    return PyDict_GetItem(own.ptr(), training) == Py_True;
  }
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), training));
  if (!found) throw py::error_already_set();
  return PyObject_IsTrue(found.ptr()) == 1;
}

// Every plan of a group's pipeline is a PlanEntry.
PlanEntry& entry_of(CachedPlan& plan) { return static_cast<PlanEntry&>(plan); }

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
             const py::list& hooked, const py::list& absent, py::object guards,
             py::object new_session, const py::tuple& policies)
    : pipeline_(take_ops(ops, places), policies_from(policies), this),
      guards_(std::move(guards)),
      new_session_(std::move(new_session)) {
  for (const auto& row : absent) {
    const auto pair = py::cast<py::tuple>(row);
    absent_.push_back({py::weakref(pair[0]), pair[0].attr("_parameters"), py::str(pair[1])});
  }
  for (const auto& module : modules) {
    const py::object owner = module.attr("_parameter_owner");
    owners_.emplace_back(owner);
    computes_training_.push_back(py::hasattr(py::type::of(owner), "training"));
  }
  for (const auto& module : hooked) {
    for (const char* name :
         {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}) {
      hook_dicts_.push_back(module.attr(name));
    }
  }
  if (!guards_.is_none()) borrowed_ = guards_.cast<const Guards*>();
  training_.assign(owners_.size(), false);
}

std::vector<OpNode> Group::take_ops(const py::list& ops, const py::list& places) {
  std::vector<OpNode> nodes;
  for (size_t i = 0; i < ops.size(); ++i) {
    OpNode op = node_from(ops[i]);
    const auto rows = py::cast<py::list>(places[i]);
    for (const auto& row : rows) {
      const auto pair = py::cast<py::tuple>(row);
      if (py::isinstance<py::int_>(pair[1])) {
        const size_t count = pair[1].cast<size_t>();
        op.parameters = numbered_names(count);
        places_.push_back({py::weakref(pair[0]), py::none(), py::str(""), count});
        continue;
      }
      const std::string name = pair[2].cast<std::string>();
      op.parameters.push_back(name);
      places_.push_back({.owner = py::weakref(pair[0]),
                         .parameters = pair[0].attr("_parameters"),
                         .name = py::str(pair[1]),
                         .is_optional = declaration(op.kind).is_optional(name)});
    }
    nodes.push_back(std::move(op));
  }
  return nodes;
}

bool Group::must_look() const {
  for (const auto& dict : hook_dicts_) {
    if (PyDict_Size(dict.ptr()) > 0) return true;
  }
  return borrowed_ != nullptr && !borrowed_->hold();
}

void Group::check_absent() const {
  for (const auto& place : absent_) {
    const PyObject* found = PyDict_GetItem(place.parameters.ptr(), place.name.ptr());
    TORCH_CHECK(found == nullptr || found == Py_None, "[",
                Py_TYPE(alive(place.owner).ptr())->tp_name, "] ", std::string(place.name),
                " must be assigned to the module after a call without one, ",
                "got a tensor that was put in its place (torch.func.functional_call)");
  }
}

bool Group::gather(PyObject* const* arguments, Py_ssize_t count, PyObject* parameters,
                   Gathered& call) const {
  if (count != static_cast<Py_ssize_t>(1 + pipeline_.extra_inputs())) return false;
  check_absent();
  Tensors& tensors = call.tensors;
  tensors.reserve(count + places_.size());
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (arguments[i] == Py_None && i > 0 && pipeline_.optional_inputs()[i - 1]) {
      tensors.emplace_back();
      continue;
    }
    if (!is_plain_tensor(arguments[i]) || is_quantized(arguments[i])) return false;
    tensors.push_back(THPVariable_Unpack(arguments[i]));
    TORCH_CHECK_NOT_IMPLEMENTED(!tensors.back().is_nested(),
                                "[run_plan] tensors must be dense, got a nested tensor; pad it, or "
                                "use one tensor of all rows");
  }
  if (parameters != Py_None) {
    for (const auto& found : py::reinterpret_borrow<py::tuple>(parameters)) {
      if (found.is_none()) {
        tensors.emplace_back();
      } else if (!add_parameter(found.ptr(), call)) {
        return false;
      }
    }
    return tensors.size() == static_cast<size_t>(count) + pipeline_.parameters();
  }
  for (const auto& place : places_) {
    if (place.parameters.is_none()) {
      const auto found = py::cast<py::sequence>(alive(place.owner).attr("_parameter_tensors")());
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
      // The parameter is parametrized, or was replaced by a plain tensor.
      attribute = alive(place.owner).attr(place.name);
      found = attribute.ptr();
    }
    if (found == Py_None && place.is_optional) {
      tensors.emplace_back();
      continue;
    }
    py::object local;
    if (is_distributed(found)) {
      local = local_parameter(alive(place.owner), place.name, found);
      found = local.ptr();
    }
    if (!add_parameter(found, call)) return false;
  }
  return true;
}

void Group::add_states(const PlanEntry& entry, Tensors& tensors) const {
  const std::vector<Value>& states = entry.plan.states;
  py::object attributes;
  for (size_t i = 0; i < states.size(); ++i) {
    const py::object owner = alive(owners_[states[i].op]);
    if (i == 0 || states[i].op != states[i - 1].op) attributes = state_of_call(owner);
    PyObject* const found = PyDict_GetItemWithError(attributes.ptr(), entry.state_names[i].ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    TORCH_CHECK(found != nullptr && THPVariable_Check(found), "[", Py_TYPE(owner.ptr())->tp_name,
                "] ", states[i].name, " must be there from the first call under the recipe on, ",
                "got none; reset_scales() drops all states");
    tensors.push_back(THPVariable_Unpack(found));
  }
}

void Group::note_inputs(const Tensors& tensors, size_t parameters) {
  last_inputs_.resize(tensors.size() - parameters);
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

void Group::write_key(const Gathered& call, const Recipe* recipe) {
  for (const int op : pipeline_.ask_training()) {
    training_[op] = is_training(alive(owners_[op]), computes_training_[op]);
  }
  pipeline_.write_key(call.tensors, training_, recipe, scratch_key_);
  for (const QuantizedParameter& row : call.quantized) {
    scratch_key_.tensors[row.position].format = row.format;
  }
}

// ---- planning

SharedPlan Group::begin(std::vector<OpNode>& ops) {
  auto entry = std::make_shared<PlanEntry>();
  entry->session = new_session_();
  const auto attributes = py::cast<py::list>(entry->session.attr("attributes")());
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].native) ops[i].attributes = attributes_from(attributes[i]);
  }
  return entry;
}

const Recipe* Group::resolve(CachedPlan& plan, const Recipe& recipe) {
  const auto text = entry_of(plan).session.attr("resolve")(recipe.custom).cast<std::string>();
  return recipe_of(text);
}

std::vector<StepGroup> Group::rewrite(CachedPlan& plan, const Fusion& fusion,
                                      const std::vector<StepGroup>& groups) {
  const Recipe* const recipe = plan.key.recipe;
  const py::object key = recipe == nullptr ? py::none() : py::object(py::str(to_text(*recipe)));
  const py::list answer = entry_of(plan).session.attr("rewrite")(
      fusion.id, to_text(fusion.pass), rewrite_groups_to_python(groups), key);
  return rewrite_groups_from_python(answer, groups);
}

UserMatcher Group::match(CachedPlan& plan, const Fusion& fusion,
                         const std::vector<StepGroup>& groups) {
  const py::object session = entry_of(plan).session;
  const int64_t id = fusion.id;
  UserMatcher user;
  user.fits = session.attr("fits")(id, rewrite_groups_to_python(groups))
                  .cast<std::vector<std::vector<bool>>>();
  user.why_not = [session, id](int first, int count) {
    return session.attr("why_not")(id, first, count).cast<std::optional<std::string>>();
  };
  user.make = [session, id](int first, int count) {
    const auto made = py::cast<py::tuple>(session.attr("make")(id, first, count));
    return StepGroup{.first = first,
                     .count = count,
                     .python = made[0].cast<int>(),
                     .name = made[1].cast<std::string>()};
  };
  return user;
}

std::vector<OpName> Group::names(CachedPlan& plan) {
  std::vector<OpName> names;
  for (const auto& row : py::list(entry_of(plan).session.attr("names"))) {
    names.push_back({.name = row.attr("name").cast<std::string>(),
                     .path = row.attr("path").cast<std::string>(),
                     .whole = row.attr("whole").cast<std::string>()});
  }
  return names;
}

void Group::finish(const SharedPlan& plan, Device device) {
  const auto entry = std::static_pointer_cast<PlanEntry>(plan);
  entry->handle = std::make_shared<ProgramHandle>(ProgramHandle{entry->program});
  entry->needs_host = entry->program->has_host_steps || entry->program->accumulates;
  if (entry->needs_host) entry->host = entry->session.attr("make_host")(entry);
  std::map<int, bool> records;  // by op: does the plan write to its state?
  for (const Value& state : entry->plan.states) {
    records[state.op] |= state.name != "fp8_scale";
    entry->state_names.push_back(
        py::reinterpret_steal<py::str>(PyUnicode_InternFromString(state.name.c_str())));
  }
  for (const auto& [op, is_written] : records) {
    const std::string recipe = to_text(Recipe{.all = entry->plan.recipe->of(op)});
    const char* const type = device == Device::Cuda ? "cuda" : "cpu";
    entry->session.attr("make_states")(op, recipe, type, is_written);
  }
}

void Group::plan_into_last(const PlanKey& key) {
  last_ = std::static_pointer_cast<PlanEntry>(pipeline_.plan(key));
}

std::shared_ptr<PlanEntry> Group::plan(bool grad, std::optional<at::ScalarType> autocast,
                                       const std::string& device,
                                       const std::vector<TensorFacts>& tensors,
                                       const std::vector<bool>& training,
                                       const std::optional<std::string>& recipe) {
  std::vector<TensorMeta> metas;
  for (const TensorFacts& tensor : tensors) {
    if (!tensor) {
      metas.push_back({.is_absent = true});
      continue;
    }
    const auto& [dtype, requires_grad, format] = *tensor;
    metas.push_back({.dtype = to_dtype(dtype),
                     .requires_grad = requires_grad,
                     .format = NumberFormat::named(format.value_or(""))});
  }
  const auto type = c10::Device(device).type();
  const Recipe* const found = recipe ? recipe_named(*recipe) : nullptr;
  plan_into_last(pipeline_.key(grad, type, autocast, std::move(metas), training, found));
  note_traced_names(to_text(last_->plan), last_->program->names);
  last_inputs_.clear();
  return last_;
}

PyObject* Group::call(PyObject* const* arguments, Py_ssize_t count, PyObject* kwargs,
                      PyObject* parameters) {
  HANDLE_TH_ERRORS
  Gathered gathered;
  if (is_cleared_ || must_look() || !gather(arguments, count, parameters, gathered)) Py_RETURN_NONE;
  const RecipeOfCall recipe;
  write_key(gathered, recipe.get());
  add_parts(gathered);
  Tensors& tensors = gathered.tensors;
  // If a plan could not be made, a stale one is still in place.
  if (!last_ || !pipeline_.is_current(*last_) || last_->key != scratch_key_) {
    // The key is copied, because planning calls Python, and another thread may write its key
    // meanwhile.
    plan_into_last(PlanKey(scratch_key_));
  }
  // A reference of its own, because another thread may plan meanwhile.
  const std::shared_ptr<PlanEntry> entry = last_;
  SharedHostCall host;
  if (entry->needs_host) {
    const auto given = kwargs != nullptr ? py::reinterpret_borrow<py::object>(kwargs) : py::none();
    host = make_host_call(entry->handle, entry->host.attr("start")(given), tensors[0]);
  }
  pipeline_.drop_absent(tensors);
  note_inputs(tensors, entry->plan.parameters.size());
  if (!entry->plan.states.empty()) add_states(*entry, tensors);
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
    Py_VISIT(place.parameters.ptr());
  }
  for (const auto& place : absent_) {
    Py_VISIT(place.parameters.ptr());
  }
  for (const auto& dict : hook_dicts_) Py_VISIT(dict.ptr());
  Py_VISIT(guards_.ptr());
  Py_VISIT(new_session_.ptr());
  const auto visit_session = [&](const PlanEntry& entry, bool is_ours) {
    // Python also owns the entry, so that it can be reached from there.
    if (!is_ours) return 0;
    Py_VISIT(entry.session.ptr());
    Py_VISIT(entry.host.ptr());
    return 0;
  };
  const std::vector<SharedPlan> plans = pipeline_.plans();
  for (const SharedPlan& plan : plans) {
    // The list above also owns the plans.
    const long owners = plan == last_ ? 3 : 2;
    if (const int stop = visit_session(entry_of(*plan), plan.use_count() == owners)) return stop;
  }
  const bool is_cached = std::ranges::find(plans, last_) != plans.end();
  return last_ && !is_cached ? visit_session(*last_, last_.use_count() == 1) : 0;
}

void Group::clear() {
  // The members are moved out first, because destructors may call back.
  const auto places = std::exchange(places_, {});
  const auto owners = std::exchange(owners_, {});
  const auto absent = std::exchange(absent_, {});
  const auto hook_dicts = std::exchange(hook_dicts_, {});
  borrowed_ = nullptr;
  const auto guards = std::exchange(guards_, py::none());
  pipeline_.forget_plans();
  const auto last = std::exchange(last_, nullptr);
  const auto new_session = std::exchange(new_session_, py::none());
  is_cleared_ = true;
}

}  // namespace transformer_ops::python
