#include "python/second_run.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

namespace transformer_ops::python {
namespace {

// Never freed: calls may come while the interpreter ends.
PyObject* recipe_state = nullptr;
PyObject* note_call = nullptr;
PyObject* region_of_call = nullptr;
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

// Whether the call may be the first run of a checkpoint. One of the non-reentrant kind packs saved
// tensors by a hook; a reentrant one runs without gradient mode in a region entered with it.
bool may_be_checkpointed(bool has_recipe) {
  static PyObject* const with_grad = PyUnicode_InternFromString("with_grad");
  if (at::SavedTensorDefaultHooks::get_hooks().has_value()) return true;
  return has_recipe && !at::GradMode::is_enabled() && of_state(with_grad).ptr() == Py_True;
}

}  // namespace

RecipeOfCall::RecipeOfCall() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (in_backward && used_recipes && region_of_call != nullptr) {
    py::object region = call(region_of_call);
    if (!region.is_none()) {
      region.attr("__enter__")();
      region_.reset(region.release().ptr());
    }
  }
  static PyObject* const key = PyUnicode_InternFromString("key");
  recipe_ = recipe_with(of_state(key));
  if (used_recipes && note_call != nullptr && may_be_checkpointed(recipe_ != nullptr))
    call(note_call);
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

void set_second_run(const py::object& note, const py::object& region) {
  Py_XSETREF(note_call, note.inc_ref().ptr());
  Py_XSETREF(region_of_call, region.inc_ref().ptr());
}

const Recipe* recipe_named(const std::string& key) {
  used_recipes = true;
  return recipe_of(key);
}

bool has_used_recipes() { return used_recipes; }

}  // namespace transformer_ops::python
