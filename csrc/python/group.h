#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fuser/planner.h"
#include "python/host.h"

namespace transformer_ops::python {

namespace py = pybind11;

// A plan with what Python needs to run or explain it.
struct PlanEntry {
  std::string key;
  int64_t version = 0;     // of the registry
  int64_t generation = 0;  // of the group's ops
  Plan plan;
  std::vector<NearMiss> near_misses;
  std::shared_ptr<ProgramHandle> handle;
  py::object session;  // holds the Python objects that steps refer to by number
  py::object host;     // transformer_ops.host.HostPlan; null where all is native

  bool needs_host = false;
};

// Where a parameter is looked up at every call: `_parameters` of its owner, or a property. A Python
// op without such a dict here lists its `count` parameters itself.
struct ParameterPlace {
  py::object owner;
  py::object parameters;  // the owner's dict
  py::str name;
  size_t count = 1;
};

struct TensorShape {
  c10::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype;
};

// The ops of one group, their plan cache, and the eager call.
class Group {
 public:
  // ops: (kind, attributes, native, sources, visible) each; places: one list per op, of (owner,
  // name), or of (Python op, count);
  // modules: whose `training` counts; hooked: whose hooks forbid this grouping;
  // absent: (module, name) of parameters that are None, so that no op of the group has them;
  // new_session(): an object with rewrite(fusion id, pass, groups) for one planning call.
  Group(const py::list& ops, const py::list& places, const py::list& modules,
        const py::list& hooked, const py::list& absent, py::object new_session, bool recompute);

  // METH_FASTCALL: (input, *extra_inputs) -> tensor, tuple of tensors, or None where Python has to
  // look (hooks, wrong arguments, tensors with a __torch_function__, an op with other parameters
  // than it had). `kwargs`: a dict for each basic op, or null.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count, PyObject* kwargs);

  // The plan for explicit facts: (grad, autocast dtype, device type, tensor facts, training).
  std::shared_ptr<PlanEntry> plan(bool grad, std::optional<at::ScalarType> autocast,
                                  const std::string& device,
                                  const std::vector<std::pair<at::ScalarType, bool>>& tensors,
                                  const std::vector<bool>& training);

  std::shared_ptr<PlanEntry> last() const { return last_; }
  // The main input and the extra inputs, if the last plan was made for a call() that ran here.
  py::list last_inputs() const;
  // Raises where a parameter that was None has been put in its place since.
  void check_absent() const;
  size_t cached_plans() const { return entries_.size(); }
  // For an op that has changed; last() stays, to be looked at.
  void forget_plans();

  // For Python's collector: all Python objects that the group holds, and letting go of them.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  bool has_hooks() const;
  bool is_current(const PlanEntry& entry) const;
  void note_inputs(const Tensors& tensors);
  bool gather(PyObject* const* arguments, Py_ssize_t count, Tensors& tensors) const;
  void write_key(const Tensors& tensors);
  std::shared_ptr<PlanEntry> find_or_make(const std::string& key);
  Facts facts_of(const std::string& key) const;

  std::vector<OpNode> ops_;
  std::vector<ParameterPlace> places_;
  std::vector<ParameterPlace> absent_;
  std::vector<int> asks_training_;  // ops whose plan depends on the training flag
  std::vector<py::object> modules_;
  std::vector<py::object> hook_dicts_;
  py::object new_session_;
  bool recompute_;
  bool is_cleared_ = false;
  size_t extra_inputs_ = 0;
  std::string scratch_key_;
  int64_t version_ = -1;
  int64_t generation_ = 0;
  std::vector<std::shared_ptr<PlanEntry>> entries_;
  std::shared_ptr<PlanEntry> last_;
  std::vector<TensorShape> last_inputs_;
};

void bind_group(py::module_& module);
void bind_memory(py::module_& module);
void bind_listeners(py::module_& module);

}  // namespace transformer_ops::python
