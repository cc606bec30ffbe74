// The class Group of the module _C: calls without pybind11, and support for the garbage collector.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "executor/check_call.h"
#include "executor/error_text.h"
#include "executor/pass_ops.h"
#include "python/group.h"
#include "python/plan_data.h"
#include "python/rename_error.h"
#include "python/tensors.h"

namespace transformer_ops::python {
namespace {

// Returns null before __init__ has run.
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
  return group_of(self)->call(arguments, count, nullptr, Py_None);
}

PyObject* call_group_with(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return group_of(self)->call(arguments + 2, count - 2, arguments[0], arguments[1]);
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastCall function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

PyMethodDef call_method = method("call", call_group);
PyMethodDef call_with_method = method("call_with", call_group_with);

// A built-in function bound to the group, which costs a fifth of a pybind11 call.
py::object make_call(PyMethodDef& method, const py::object& group) {
  auto call = py::reinterpret_steal<py::object>(PyCFunction_New(&method, group.ptr()));
  if (!call) throw py::error_already_set();
  return call;
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
      .def(py::init<py::list, py::list, py::list, py::list, py::list, py::object, py::object,
                    py::tuple>())
      .def("forget_plans", [](Group& group) { group.pipeline().forget_plans(); })
      .def("check_absent", torch::wrap_pybind_function(&Group::check_absent))
      .def(
          "make_call", [](const py::object& group) { return make_call(call_method, group); },
          "The eager call: (input, *extra_inputs).")
      .def(
          "make_call_with",
          [](const py::object& group) { return make_call(call_with_method, group); },
          "The same with a dict of keyword arguments for each basic op, and with these parameters "
          "instead of the modules' own, or None: (kwargs, parameters, input, *extra_inputs).")
      .def("plan", torch::wrap_pybind_function(&Group::plan))
      .def_property_readonly("optional_inputs",
                             [](Group& group) { return group.pipeline().optional_inputs(); })
      .def_property_readonly("last", &Group::last)
      .def_property_readonly("last_inputs", &Group::last_inputs)
      .def_property_readonly("cached_plans",
                             [](Group& group) { return group.pipeline().plans().size(); });
  set_rename_host_error(rename_python_error);
  module.def("set_recipe_state", &set_recipe_state);
  module.def("set_second_run", &set_second_run);
  module.def("key_of_compiled_call", &key_of_compiled_call);
  module.def("state_getter", &state_getter);
  module.def("has_used_recipes", &has_used_recipes);
  module.def("set_quantized_class", &set_quantized_class);
  module.def("set_take_local", &set_take_local);
  // The same as the ops, but dispatch modes see the typed ops.
  module.def("plan_forward",
             torch::wrap_pybind_function([](const std::string& plan, const Tensors& tensors) {
               return plan_forward(plan, tensors);
             }));
  module.def("plan_backward",
             torch::wrap_pybind_function(
                 [](const std::string& plan, const Tensors& grads, const Tensors& saved) {
                   return plan_backward(plan, grads, saved);
                 }));
  module.def("parse_plan", torch::wrap_pybind_function([](const std::string& text) {
               const Plan plan = parse_plan(text);
               check_calls(plan);
               return py::make_tuple(to_text(plan), plan_to_python(plan));
             }));
}

}  // namespace transformer_ops::python
