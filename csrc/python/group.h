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
  py::object session;  // holds the Python objects that steps refer to by number
  py::object host;     // transformer_ops.runtime.host.HostPlan; null where all is native
  std::vector<py::str> state_names;  // of the plan's states, as keys of dicts

  bool needs_host = false;
};

// Where a parameter is looked up at every call: `_parameters` of its owner, or a property. A Python
// op without such a dict here lists its `count` parameters itself.
struct ParameterPlace {
  py::object owner;
  py::object parameters;  // the owner's dict
  py::str name;
  size_t count = 1;
  bool is_optional = false;
};

// (dtype, requires_grad, format of a quantized one); none for None.
using TensorFacts = std::optional<std::tuple<at::ScalarType, bool, std::optional<std::string>>>;

struct TensorShape {
  c10::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype;
};

// The ops of one group with their modules, and the eager call.
class Group : private PlanHost {
 public:
  // ops: (kind, attributes, native, sources, visible) each; places: one list per op, of (owner, its
  // name for the tensor, the op's name for it), or of (Python op, count);
  // modules: whose `training` counts; hooked: whose hooks forbid this grouping;
  // absent: (module, name) of parameters that are None, so that no op of the group has them;
  // guards: what the ops take for granted of modules whose parameters they borrow, a Guards or
  // None; new_session(): a PlanningSession for one planning call; policies: (recompute, saved,
  // saved_inputs).
  Group(const py::list& ops, const py::list& places, const py::list& modules,
        const py::list& hooked, const py::list& absent, py::object guards, py::object new_session,
        const py::tuple& policies);

  // METH_FASTCALL: (input, *extra_inputs) -> tensor, tuple of tensors, or None where Python has to
  // look (hooks, wrong arguments, tensors with a __torch_function__, an op with other parameters
  // than it had). An optional input may be None. `kwargs`: a dict for each basic op, or null.
  // `parameters`: a sequence in place of what the modules have, or None.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count, PyObject* kwargs,
                 PyObject* parameters);

  // The plan for the key that these make. `tensors` are the main input, extra inputs and
  // parameters.
  std::shared_ptr<PlanEntry> plan(bool grad, std::optional<at::ScalarType> autocast,
                                  const std::string& device,
                                  const std::vector<TensorFacts>& tensors,
                                  const std::vector<bool>& training,
                                  const std::optional<std::string>& recipe);

  std::shared_ptr<PlanEntry> last() const { return last_; }
  // The main input and the extra inputs, if the last plan was made for a call() that ran here.
  py::list last_inputs() const;
  // Raises where a parameter that was None has been put in its place since.
  void check_absent() const;
  // Where its plans are forgotten, last() stays, to be looked at.
  Pipeline& pipeline() { return pipeline_; }

  // For Python's collector: all Python objects that the group holds, and letting go of them.
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

  // The ops as nodes; notes where their parameters are.
  std::vector<OpNode> take_ops(const py::list& ops, const py::list& places);
  // Whether a call must not go past the modules: one has hooks, or is not as it was.
  bool must_look() const;
  void note_inputs(const Tensors& tensors, size_t parameters);
  bool gather(PyObject* const* arguments, Py_ssize_t count, PyObject* parameters,
              Gathered& call) const;
  void write_key(const Gathered& call, const Recipe* recipe);
  void plan_into_last(const PlanKey& key);

  // The states of a plan, from the modules that own those of their ops.
  void add_states(const PlanEntry& entry, Tensors& tensors) const;

  std::vector<ParameterPlace> places_;
  std::vector<py::object> owners_;  // of each op's parameters and states
  Pipeline pipeline_;
  std::vector<ParameterPlace> absent_;
  std::vector<py::object> modules_;
  std::vector<py::object> hook_dicts_;
  py::object guards_;  // holds the next
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
void bind_listeners(py::module_& module);
void bind_delayed_scales(py::module_& module);

}  // namespace transformer_ops::python
