// A list of ops with its plans: what a module of the host language, or a C++ program, calls.
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
#include "runtime/op_scales.h"

namespace transformer_ops {

// A plan that a pipeline keeps, with the program that runs it.
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

// What a host language adds to planning.
class PlanHost {
 public:
  virtual ~PlanHost() = default;

  // Begins one planning call: the plan to fill, and the attributes that the ops have now.
  virtual SharedPlan begin(std::vector<OpNode>& ops) = 0;
  // Of a recipe that is its own: the same with the formats of each op.
  virtual const Recipe* resolve(CachedPlan& plan, const Recipe& recipe) = 0;
  // Calls a user's function.
  virtual std::vector<StepGroup> rewrite(CachedPlan& plan, const Fusion& fusion,
                                         const std::vector<StepGroup>& groups) = 0;
  // Says of a user's pattern what it takes.
  virtual UserMatcher match(CachedPlan& plan, const Fusion& fusion,
                            const std::vector<StepGroup>& groups) = 0;
  // What a user calls each op.
  virtual std::vector<OpName> names(CachedPlan& plan) = 0;
  virtual void finish(const SharedPlan& plan, Device device) = 0;
};

// Plans at the first call for each key, and keeps the plans. May be called from several threads.
class Pipeline {
 public:
  // Throws c10::Error for no ops, and for channels that do not fit.
  explicit Pipeline(std::vector<OpNode> ops, Policies policies = {.recompute = true},
                    PlanHost* host = nullptr);

  const std::vector<OpNode>& ops() const { return ops_; }
  size_t extra_inputs() const { return extra_inputs_; }  // from the caller
  // Of each: may the caller give None for it?
  const std::vector<bool>& optional_inputs() const { return optional_inputs_; }
  size_t parameters() const { return parameters_; }  // of all ops
  // Ops whose plan depends on their training flag.
  const std::vector<int>& ask_training() const { return ask_training_; }

  // tensors: the main input, the caller's extra inputs, the parameters of each op, undefined where
  // an optional one is None; training: of each op. Gradients, device and autocast are those of the
  // calling thread.
  void write_key(at::TensorList tensors, const std::vector<bool>& training, const Recipe* recipe,
                 PlanKey& key) const;
  // The key for a call that another thread, or a compiled graph, will make.
  PlanKey key(bool grad_enabled, c10::DeviceType device, std::optional<at::ScalarType> autocast,
              std::vector<TensorMeta> tensors, const std::vector<bool>& training,
              const Recipe* recipe) const;
  // Throws c10::Error where the ops cannot be planned.
  SharedPlan plan(const PlanKey& key);
  bool is_current(const CachedPlan& plan) const;
  // A program takes none for those that are None.
  void drop_absent(std::vector<at::Tensor>& tensors) const;
  // For an op that has changed.
  void forget_plans();
  std::vector<SharedPlan> plans() const;  // those kept

  // ---- without a host language

  // The main output, then the visible extra outputs. Differentiable.
  // Throws c10::Error for a tensor that does not fit its op, or is undefined where it is not
  // optional, and for another number of them.
  std::vector<at::Tensor> operator()(const at::Tensor& input, at::TensorList parameters,
                                     at::TensorList extra_inputs = {});
  void train(bool on = true);
  // Of the calls from now on; null for none. See recipe_of(). Throws c10::Error for one of a host
  // language.
  void set_recipe(const Recipe* recipe);
  // Of delayed scaling, once a step and before its first forward: makes scales of what calls with
  // gradients have met since the last time, forward and backward. Scales are made by the first call
  // that needs them, and are 1 until then. Throws c10::Error without a recipe that has delayed
  // scales.
  void update_scales(const ScaleUpdate& how = {});
  // What delayed scaling keeps, for a checkpoint: "op.name" -> tensor, with the names and shapes of
  // the buffers of a Python module; set_scales() copies them.
  OpScales::Named scales() const { return scales_.named(); }
  // Throws c10::Error for those that do not fit the ops, before anything changes.
  void set_scales(const OpScales::Named& scales) { scales_.set(ops_, scales); }
  // For a recipe of other formats, or another length of the history.
  void reset_scales() { scales_.clear(); }
  // "op.name" of each parameter, in the order of the call.
  std::vector<std::string> parameter_names() const;
  // The plan of the last call. Throws c10::Error before any.
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
  std::vector<bool> optional_inputs_;  // per extra input from the caller
  bool has_optional_ = false;

  mutable ForkSafeMutex mutex_;
  std::atomic<int64_t> generation_ = 0;
  std::vector<SharedPlan> plans_;  // the one asked for last comes last
  SharedPlan last_;
  std::atomic<bool> is_training_ = true;
  std::atomic<const Recipe*> recipe_ = nullptr;
  OpScales scales_;
};

}  // namespace transformer_ops
