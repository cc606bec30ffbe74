// A list of ops with its plans, which a module of the host language or a C++ program calls.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "executor/program.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/op_node.h"
#include "fuser/planner.h"
#include "runtime/pipeline_scales.h"

namespace transformer_ops {

// A cached plan with the program that runs it.
struct CachedPlan {
  virtual ~CachedPlan() = default;

  PlanKey key;
  Plan plan;
  std::vector<NearMiss> near_misses;
  SharedProgram program;
  int64_t version = 0;     // of the registry
  int64_t generation = 0;  // of the pipeline's ops
};
using SharedPlan = std::shared_ptr<CachedPlan>;

// The parts of planning that a host language implements.
class PlanHost {
 public:
  virtual ~PlanHost() = default;

  // Begins a planning call: returns the plan to fill, and updates the attributes of the ops.
  virtual SharedPlan begin(std::vector<OpNode>& ops) = 0;
  // Resolves a recipe of the host language to one with formats for each op.
  virtual const Recipe* resolve(CachedPlan& plan, const Recipe& recipe) = 0;
  // Calls a user's function.
  virtual std::vector<StepGroup> rewrite(CachedPlan& plan, const Fusion& fusion,
                                         const std::vector<StepGroup>& groups) = 0;
  // Returns what a user's pattern accepts.
  virtual UserMatcher match(CachedPlan& plan, const Fusion& fusion,
                            const std::vector<StepGroup>& groups) = 0;
  // The user's name for each op.
  virtual std::vector<OpName> names(CachedPlan& plan) = 0;
  virtual void finish(const SharedPlan& plan, Device device) = 0;
};

// Plans at the first call for each key, and caches the plans. Several threads may call it.
class Pipeline {
 public:
  // Throws c10::Error if there are no ops, or if channels do not match.
  explicit Pipeline(std::vector<OpNode> ops, Policies policies = {.recompute = Recompute::Cheap},
                    PlanHost* host = nullptr);

  const std::vector<OpNode>& ops() const { return ops_; }
  size_t extra_inputs() const { return extra_inputs_; }  // from the caller
  // For each extra input: may it be None?
  const std::vector<bool>& optional_inputs() const { return optional_inputs_; }
  size_t parameters() const { return parameters_; }  // of all ops
  // The ops whose plan depends on their training flag.
  const std::vector<int>& ask_training() const;

  // tensors: the main input, the caller's extra inputs, and the parameters of each op, undefined if
  // an optional one is None; training: for each op. Gradient mode, device and autocast are those of
  // the calling thread.
  void write_key(at::TensorList tensors, const std::vector<bool>& training, const Recipe* recipe,
                 PlanKey& key) const;
  // The key for a call that another thread, or a compiled graph, will make.
  PlanKey key(bool grad_enabled, c10::DeviceType device, std::optional<at::ScalarType> autocast,
              std::vector<TensorMeta> tensors, const std::vector<bool>& training,
              const Recipe* recipe) const;
  // Throws c10::Error if the ops cannot be planned.
  SharedPlan plan(const PlanKey& key);
  bool is_current(const CachedPlan& plan) const;
  // Removes tensors that are None, because programs do not take them.
  void drop_absent(std::vector<at::Tensor>& tensors) const;
  // Call this after an op has changed.
  void forget_plans();
  std::vector<SharedPlan> plans() const;  // the cached plans

  // ---- calls without a host language

  // Returns the main output, then the visible extra outputs. It is differentiable.
  // Throws c10::Error if a tensor does not fit its op, if a required one is undefined, or if their
  // number is wrong.
  std::vector<at::Tensor> operator()(const at::Tensor& input, at::TensorList parameters,
                                     at::TensorList extra_inputs = {});
  void train(bool on = true);
  // Sets the recipe of later calls; null for none. See recipe_of(). Throws c10::Error for a recipe
  // of a host language.
  void set_recipe(const Recipe* recipe);
  // For delayed scaling: call this once a step, before its first forward. It computes scales from
  // the magnitudes of calls with gradients since the last update, forward and backward. The first
  // call that needs scales creates them as 1. Throws c10::Error without a recipe that has delayed
  // scales.
  void update_scales(const ScaleUpdate& how = {});
  // The delayed scaling buffers for a checkpoint: "op.name" -> tensor, with the names and shapes of
  // a Python module's buffers. set_scales() copies them.
  PipelineScales::Named scales() const { return scales_.named(); }
  // Throws c10::Error, with nothing changed, if the tensors do not fit the ops.
  void set_scales(const PipelineScales::Named& scales) { scales_.set(ops_, scales); }
  // Needed for a recipe with other formats, or another history length.
  void reset_scales() { scales_.clear(); }
  // The "op.name" of each parameter, in the order of the call.
  std::vector<std::string> parameter_names() const;
  // The plan of the last call. Throws c10::Error before the first call.
  std::shared_ptr<const CachedPlan> last_plan() const;

 private:
  void note_optional(const OpNode& op);
  void add_training(const std::vector<bool>& training, PlanKey& key) const;
  SharedPlan find(const PlanKey& key);
  void add(const SharedPlan& plan);
  SharedPlan make(const PlanKey& key) const;

  const std::vector<OpNode> ops_;
  const Policies policies_;
  PlanHost* const host_;
  size_t extra_inputs_ = 0;
  size_t parameters_ = 0;
  std::vector<int> ask_training_;
  std::vector<int> every_op_;
  std::vector<bool> optional_inputs_;  // for each extra input from the caller
  bool has_optional_ = false;

  mutable ForkSafeMutex mutex_;
  std::atomic<int64_t> generation_ = 0;
  std::vector<SharedPlan> plans_;  // the most recently used one is last
  SharedPlan last_;
  std::atomic<bool> is_training_ = true;
  std::atomic<const Recipe*> recipe_ = nullptr;
  PipelineScales scales_;
};

}  // namespace transformer_ops
