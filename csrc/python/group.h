#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/guards.h"
#include "python/host.h"
#include "python/second_run.h"
#include "python/tensors.h"
#include "runtime/pipeline.h"

namespace transformer_ops::python {

namespace py = pybind11;

// A plan with what Python needs to run or explain it.
struct PlanEntry : CachedPlan {
  std::shared_ptr<ProgramHandle> handle;
  py::object session;  // owns the Python objects that steps refer to by number
  py::object host;     // transformer_ops.runtime.host.HostPlan; null if all steps are native
  std::vector<py::str> state_names;  // the names of the plan's states, as keys of dicts

  bool needs_host = false;
};

// The place where a parameter is looked up at every call: `_parameters` of its owner, or a
// property. A Python op without such a dict lists its `count` parameters itself.
struct ParameterPlace {
  py::weakref owner;
  py::object parameters;  // the owner's dict
  py::str name;
  size_t count = 1;
  bool is_optional = false;
};

// (dtype, requires_grad, format if it is quantized); none for None.
using TensorFacts = std::optional<std::tuple<at::ScalarType, bool, std::optional<std::string>>>;

struct TensorShape {
  c10::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype;
};

// The ops of one group, and the eager call. The group does not keep modules alive: an op owns the
// group that runs it alone.
class Group : private PlanHost {
 public:
  // ops: (kind, attributes, native, sources, visible) each
  // places: one list for each op, of (owner, its name for the tensor, the op's name for it), or of
  // (Python op, count)
  // modules: those whose `training` matters
  // hooked: those whose hooks forbid this grouping
  // absent: (module, name) of parameters that are None, so that no op of the group has them
  // guards: a Guards with what the ops assume about modules whose parameters they borrow, or None
  // new_session(): a PlanningSession for one planning call
  // policies: (recompute, saved, saved_inputs)
  Group(const py::list& ops, const py::list& places, const py::list& modules,
        const py::list& hooked, const py::list& absent, py::object guards, py::object new_session,
        const py::tuple& policies);

  // METH_FASTCALL: (input, *extra_inputs) -> tensor, tuple of tensors, or None if Python has to
  // handle the call (hooks, wrong arguments, tensors with a __torch_function__, an op whose
  // parameters were replaced). An optional input may be None. `kwargs`: a dict for each basic op,
  // or null. `parameters`: a sequence to use instead of the modules' parameters, or None.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count, PyObject* kwargs,
                 PyObject* parameters);

  // The plan for the key that the arguments give. `tensors` are the main input, extra inputs and
  // parameters.
  std::shared_ptr<PlanEntry> plan(bool grad, std::optional<at::ScalarType> autocast,
                                  const std::string& device,
                                  const std::vector<TensorFacts>& tensors,
                                  const std::vector<bool>& training,
                                  const std::optional<std::string>& recipe);

  std::shared_ptr<PlanEntry> last() const { return last_; }
  // The main input and the extra inputs, if the last plan was made for a call() in this group.
  py::list last_inputs() const;
  // Raises if a parameter that was None has been set since.
  void check_absent() const;
  // Forgetting its plans keeps last(), which can still be inspected.
  Pipeline& pipeline() { return pipeline_; }

  // For Python's garbage collector: visits all Python objects of the group, and releases them.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  SharedPlan begin(std::vector<OpNode>& ops) override;
  const Recipe* resolve(CachedPlan& plan, const Recipe& recipe) override;
  std::vector<StepGroup> rewrite(CachedPlan& plan, const Fusion& fusion,
                                 const std::vector<StepGroup>& groups) override;
  UserMatcher match(CachedPlan& plan, const Fusion& fusion,
                    const std::vector<StepGroup>& groups) override;
  std::vector<OpName> names(CachedPlan& plan) override;
  void finish(const SharedPlan& plan, Device device) override;

  // Converts the ops to nodes, and records the places of their parameters.
  std::vector<OpNode> take_ops(const py::list& ops, const py::list& places);
  // Must Python handle the call, because a module has hooks or has changed?
  bool must_look() const;
  void note_inputs(const Tensors& tensors, size_t parameters);
  bool gather(PyObject* const* arguments, Py_ssize_t count, PyObject* parameters,
              Gathered& call) const;
  void write_key(const Gathered& call, const Recipe* recipe);
  void plan_into_last(const PlanKey& key);

  // Adds the states of a plan, from the modules that own them.
  void add_states(const PlanEntry& entry, Tensors& tensors) const;

  std::vector<ParameterPlace> places_;
  std::vector<py::weakref> owners_;  // of each op's parameters and states
  Pipeline pipeline_;
  std::vector<ParameterPlace> absent_;
  std::vector<bool> computes_training_;  // for each op: does the owner's class compute the flag?
  std::vector<py::object> hook_dicts_;
  py::object guards_;  // owns the next member
  const Guards* borrowed_ = nullptr;
  py::object new_session_;
  bool is_cleared_ = false;
  std::vector<bool> training_;
  PlanKey scratch_key_;
  std::shared_ptr<PlanEntry> last_;
  std::vector<TensorShape> last_inputs_;
};

void bind_group(py::module_& module);
void bind_memory(py::module_& module);
void bind_allocations(py::module_& module);
void bind_threads(py::module_& module);
void bind_listeners(py::module_& module);
void bind_delayed_scales(py::module_& module);

}  // namespace transformer_ops::python
