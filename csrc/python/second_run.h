// The recipe of a call: that of the region around it or, in the second run of a checkpoint, that of
// its first run.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "fuser/recipe.h"

namespace transformer_ops::python {

namespace py = pybind11;

// It exists for the time of a call. Throws what Python raises if the second run differs from the
// first one.
class RecipeOfCall {
 public:
  RecipeOfCall();

  const Recipe* get() const { return recipe_; }

 private:
  // Leaves the region of a first run.
  struct Leave {
    void operator()(PyObject* region) const;
  };

  std::unique_ptr<PyObject, Leave> region_;
  const Recipe* recipe_ = nullptr;
};

// The dict with the scales that a call of a module uses, by name: the module's own or, in a second
// run, those of the first run.
py::object state_of_call(const py::object& owner);

// `state`: Python's object whose `key` names the recipe of the calling thread, or is None, and
// whose `kept` has the scales of a first run, or is None.
void set_recipe_state(const py::object& state);
// Installs the functions of that name in transformer_ops/quantization/second_run.py.
void set_second_run(const py::object& note_call, const py::object& region_of_call,
                    const py::object& key_of_call, const py::object& state_of_call);

// Getters of properties that compiled code reads. Dynamo does not trace into them: it guards on
// their results or passes them to the graph, and so reads them before each call of a graph.
//
// The key of the recipe of the thread's calls, or None. It also records a first run, as an eager
// call does.
py::object key_of_compiled_call(const py::object& self);
// A getter that returns, for a module, the state of this name that a call uses. It raises
// AttributeError if there is none.
py::object state_getter(const py::str& name);

// The recipe of a key, for a call that is traced.
const Recipe* recipe_named(const std::string& key);
// Has any call of the process, including compiled code, had a recipe?
bool has_used_recipes();

}  // namespace transformer_ops::python
