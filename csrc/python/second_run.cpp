#include "python/second_run.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <string>

namespace transformer_ops::python {
namespace {

// Never freed: calls may come while the interpreter ends.
PyObject* recipe_state = nullptr;
PyObject* note_call = nullptr;
PyObject* find_region = nullptr;
std::atomic<uint64_t> changed_scales = 0;

py::object attribute(PyObject* object, PyObject* name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!found) throw py::error_already_set();
  return found;
}

py::object of_state(PyObject* name) {
  return recipe_state == nullptr ? py::none() : attribute(recipe_state, name);
}

const Recipe* recipe_with(const py::object& key) {
  if (key.is_none()) return nullptr;
  // Within a region it is the same object at each call.
  static py::object& last_key = *new py::object();
  static const Recipe* last = nullptr;
  if (!key.is(last_key)) {
    last = recipe_of(key.cast<std::string>());
    last_key = key;
  }
  return last;
}

bool packs_saved_tensors() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

}  // namespace

void LastRun::note(PyObject* key, const Recipe* recipe) {
  static PyObject* const recipe_name = PyUnicode_InternFromString("recipe");
  static PyObject* const with_grad = PyUnicode_InternFromString("with_grad");
  if (!has_run_ || key_.ptr() != key) {
    key_ = py::reinterpret_borrow<py::object>(key);
    recipe_ = of_state(recipe_name);
  }
  if (recipe != nullptr && recipe->all.is_delayed()) {
    const uint64_t now = changed_scales.load(std::memory_order_relaxed);
    // A reentrant checkpoint runs first without gradient mode, in a region that was entered with
    // it. Other calls do not run again unless a checkpoint's own hook tells.
    if (!at::GradMode::is_enabled() && of_state(with_grad).ptr() == Py_True) {
      has_several_ |= is_awaited_ && scales_ != now;
      is_awaited_ = true;
    }
    scales_ = now;
  }
  has_run_ = true;
}

py::object LastRun::region_of_call() {
  if (find_region == nullptr) return py::none();
  const bool has_same_scales = !has_several_ && scales_ == changed_scales.load();
  is_awaited_ = has_several_ = false;
  py::object recipe = recipe_ ? recipe_ : py::none();
  const py::handle find(find_region);
  return find(has_run_, recipe, has_same_scales);
}

int LastRun::traverse(visitproc visit, void* arg) const {
  Py_VISIT(recipe_.ptr());
  return 0;
}

RecipeOfCall::RecipeOfCall(LastRun& last) {
  static PyObject* const name = PyUnicode_InternFromString("key");
  const bool has_grad = at::GradMode::is_enabled();
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (in_backward && has_grad) {
    py::object region = last.region_of_call();
    if (!region.is_none()) {
      region.attr("__enter__")();
      region_ = std::move(region);
    }
  }
  const py::object key = of_state(name);
  recipe_ = recipe_with(key);
  if (!in_backward) last.note(key.ptr(), recipe_);
  if (recipe_ != nullptr && has_grad && note_call != nullptr && packs_saved_tensors()) {
    const py::handle note(note_call);
    note();
  }
}

RecipeOfCall::~RecipeOfCall() {
  if (!region_) return;
  const py::error_scope error;
  try {
    region_.attr("__exit__")(py::none(), py::none(), py::none());
  } catch (py::error_already_set& failed) {
    failed.discard_as_unraisable("transformer_ops: leaving the region of a second run");
  }
}

void note_changed_scales() { changed_scales.fetch_add(1, std::memory_order_relaxed); }

void set_recipe_state(const py::object& state) { Py_XSETREF(recipe_state, state.inc_ref().ptr()); }

void set_second_run(const py::object& note, const py::object& region) {
  Py_XSETREF(note_call, note.inc_ref().ptr());
  Py_XSETREF(find_region, region.inc_ref().ptr());
}

}  // namespace transformer_ops::python
