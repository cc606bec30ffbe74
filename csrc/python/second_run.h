// The recipe of a call: that of the region around it. In a backward pass, as under activation
// checkpointing, it is that of the call's first run.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "fuser/recipe.h"

namespace transformer_ops::python {

namespace py = pybind11;

// The last call of a group outside of any backward pass.
class LastRun {
 public:
  void note(PyObject* key, const Recipe* recipe);
  // The region that a call in a backward pass has to enter, or None.
  py::object region_of_call();

  int traverse(visitproc visit, void* arg) const;

 private:
  bool has_run_ = false;
  py::object key_, recipe_;
  uint64_t scales_ = 0;  // how often delayed scaling had changed scales
  // Whether calls that a reentrant checkpoint may run again came since the last second run, and
  // whether they had different scales.
  bool is_awaited_ = false, has_several_ = false;
};

// Lives as long as a call. Throws what Python raises where the first run is not known.
class RecipeOfCall {
 public:
  explicit RecipeOfCall(LastRun& last);
  ~RecipeOfCall();
  RecipeOfCall(const RecipeOfCall&) = delete;
  RecipeOfCall& operator=(const RecipeOfCall&) = delete;

  const Recipe* get() const { return recipe_; }

 private:
  py::object region_;
  const Recipe* recipe_ = nullptr;
};

// Counts changes of scales by regions of delayed scaling.
void note_changed_scales();

// `state`: Python's object whose `key` names the recipe of the calling thread, or is None.
void set_recipe_state(const py::object& state);
// Those of transformer_ops/quantization/second_run.py.
void set_second_run(const py::object& note_call, const py::object& region_of_call);

}  // namespace transformer_ops::python
