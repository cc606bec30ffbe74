#include "python/second_run.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

namespace transformer_ops::python {
namespace {

// It is never freed, because calls may come while the interpreter shuts down.
PyObject* recipe_state = nullptr;
struct {
  PyObject* note_call = nullptr;
  PyObject* region_of_call = nullptr;
  PyObject* key_of_call = nullptr;
  PyObject* state_of_call = nullptr;
} asked;
bool used_recipes = false;

py::object of_state(PyObject* name) {
  if (recipe_state == nullptr) return py::none();
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(recipe_state, name));
  if (!found) throw py::error_already_set();
  return found;
}

const Recipe* recipe_with(const py::object& key) {
  if (key.is_none()) return nullptr;
  used_recipes = true;
  // Within a region it is the same object at each call.
  static py::object& last_key = *new py::object();
  static const Recipe* last = nullptr;
  if (!key.is(last_key)) {
    last = recipe_of(key.cast<std::string>());
    last_key = key;
  }
  return last;
}

py::object call(PyObject* function) {
  auto found = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function));
  if (!found) throw py::error_already_set();
  return found;
}

// May the call be in the first run of a checkpoint? A non-reentrant checkpoint packs saved tensors
// with a hook; a reentrant one runs without gradient mode in a region that was entered with it.
bool may_be_checkpointed(bool has_recipe) {
  static PyObject* const with_grad = PyUnicode_InternFromString("with_grad");
  if (at::SavedTensorDefaultHooks::get_hooks().has_value()) return true;
  return has_recipe && !at::GradMode::is_enabled() && of_state(with_grad).ptr() == Py_True;
}

py::object key_of_state() {
  static PyObject* const key = PyUnicode_InternFromString("key");
  return of_state(key);
}

void note_if_checkpointed(bool has_recipe) {
  if (used_recipes && asked.note_call != nullptr && may_be_checkpointed(has_recipe))
    call(asked.note_call);
}

bool may_be_second_run(const PyObject* function) {
  return used_recipes && function != nullptr && torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace

RecipeOfCall::RecipeOfCall() {
  if (may_be_second_run(asked.region_of_call)) {
    py::object region = call(asked.region_of_call);
    if (!region.is_none()) {
      region.attr("__enter__")();
      region_.reset(region.release().ptr());
    }
  }
  recipe_ = recipe_with(key_of_state());
  note_if_checkpointed(recipe_ != nullptr);
}

py::object state_of_call(const py::object& owner) {
  static PyObject* const kept = PyUnicode_InternFromString("kept");
  static PyObject* const attributes = PyUnicode_InternFromString("__dict__");
  const bool is_own = !may_be_second_run(asked.state_of_call) && of_state(kept).is_none();
  auto found = py::reinterpret_steal<py::object>(
      is_own ? PyObject_GetAttr(owner.ptr(), attributes)
             : PyObject_CallOneArg(asked.state_of_call, owner.ptr()));
  if (!found) throw py::error_already_set();
  return found;
}

void RecipeOfCall::Leave::operator()(PyObject* region) const {
  const py::error_scope error;
  const auto owned = py::reinterpret_steal<py::object>(region);
  try {
    owned.attr("__exit__")(py::none(), py::none(), py::none());
  } catch (py::error_already_set& failed) {
    failed.discard_as_unraisable("transformer_ops: leaving the region of a first run");
  }
}

void set_recipe_state(const py::object& state) { Py_XSETREF(recipe_state, state.inc_ref().ptr()); }

void set_second_run(const py::object& note_call, const py::object& region_of_call,
                    const py::object& key_of_call, const py::object& state_of_call) {
  Py_XSETREF(asked.note_call, note_call.inc_ref().ptr());
  Py_XSETREF(asked.region_of_call, region_of_call.inc_ref().ptr());
  Py_XSETREF(asked.key_of_call, key_of_call.inc_ref().ptr());
  Py_XSETREF(asked.state_of_call, state_of_call.inc_ref().ptr());
}

py::object key_of_compiled_call(const py::object& /*self*/) {
  if (may_be_second_run(asked.key_of_call)) return call(asked.key_of_call);
  py::object key = key_of_state();
  used_recipes = used_recipes || !key.is_none();
  note_if_checkpointed(!key.is_none());
  return key;
}

py::object state_getter(const py::str& name) {
  return py::cpp_function([name](const py::object& owner) {
    const py::object state = state_of_call(owner);
    PyObject* const found = PyDict_GetItemWithError(state.ptr(), name.ptr());
    if (found == nullptr && PyErr_Occurred() == nullptr)
      PyErr_SetObject(PyExc_AttributeError, name.ptr());
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(found);
  });
}

const Recipe* recipe_named(const std::string& key) {
  used_recipes = true;
  return recipe_of(key);
}

bool has_used_recipes() { return used_recipes; }

}  // namespace transformer_ops::python
