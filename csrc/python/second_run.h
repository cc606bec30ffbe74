// The recipe of a call: that of the region around it, or, in the second run of a checkpoint, that
// of its first run.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "fuser/recipe.h"

namespace transformer_ops::python {

namespace py = pybind11;

// Lives as long as a call. Throws what Python raises if the second run differs from the first one.
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

// The dict with the state that a call uses of a module with scales, by name: its own, or, in a
// second run, that of the first one.
py::object state_of_call(const py::object& owner);

// `state`: Python's object whose `key` names the recipe of the calling thread, or is None, and
// whose `kept` has the scales of a first run, or is None.
void set_recipe_state(const py::object& state);
// Installs the functions of that name in transformer_ops/quantization/second_run.py.
void set_second_run(const py::object& note_call, const py::object& region_of_call,
                    const py::object& key_of_call, const py::object& state_of_call);

// What compiled code reads, as getters of properties: Dynamo does not trace into them, guards on
// what they give or gives it to the graph, and so reads them before each call of a graph.
//
// The key of the recipe that the thread's calls have, or None. It also notes a first run, as an
// eager call does.
py::object key_of_compiled_call(const py::object& self);
// A getter that gives, for a module, the state of this name that a call uses. AttributeError if it
// has none.
py::object state_getter(const py::str& name);

// The recipe of a key, for a call that is traced.
const Recipe* recipe_named(const std::string& key);
// Whether any call of the process, also in compiled code, had a recipe.
bool has_used_recipes();

}  // namespace transformer_ops::python
