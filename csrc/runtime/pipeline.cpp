#include "runtime/pipeline.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "executor/run.h"
#include "fuser/declaration.h"
#include "fuser/error.h"
#include "op/dtype.h"

namespace transformer_ops {
namespace {

// more than the modes, dtypes and frozen parameters that alternate
constexpr size_t kCachedPlans = 64;

Device to_device(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return Device::Cpu;
  return type == c10::DeviceType::CUDA ? Device::Cuda : Device::Other;
}

std::optional<DType> autocast_dtype(c10::DeviceType type) {
  // Some devices, such as meta, have no autocast.
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type)) {
    return std::nullopt;
  }
  return to_dtype(at::autocast::get_autocast_dtype(type));
}

void check_sources(const std::vector<OpNode>& ops) {
  for (size_t i = 0; i < ops.size(); ++i) {
    for (const auto& source : ops[i].sources) {
      if (!source) continue;
      const bool is_before = source->op >= 0 && source->op < static_cast<int>(i);
      TORCH_CHECK(is_before, "[", ops[i].kind, "] an extra input must come from an op before op ",
                  i, ", got op ", source->op);
      const OpNode& from = ops[source->op];
      const auto count = std::ssize(from.extra_outputs);
      TORCH_CHECK(source->output >= 0 && source->output < count, "[", ops[i].kind,
                  "] an extra input must be one of the ", count, " extra outputs of ", from.kind,
                  ", got ", source->output);
    }
  }
}

}  // namespace

Pipeline::Pipeline(std::vector<OpNode> ops, Policies policies, PlanHost* host)
    : ops_(std::move(ops)), policies_(policies), host_(host) {
  TORCH_CHECK(!ops_.empty(), "[Pipeline] ops must not be empty, got none");
  check_sources(ops_);
  extra_inputs_ = extra_inputs_from_caller(ops_);
  for (size_t i = 0; i < ops_.size(); ++i) {
    every_op_.push_back(static_cast<int>(i));
    parameters_ += ops_[i].parameters.size();
    note_optional(ops_[i]);
    if (ops_[i].native && declaration(ops_[i].kind).asks_training()) {
      ask_training_.push_back(static_cast<int>(i));
    }
  }
}

void Pipeline::note_optional(const OpNode& op) {
  const auto may_be_none = [&](const std::string& name) {
    return op.native && declaration(op.kind).is_optional(name);
  };
  for (size_t k = 0; k < op.extra_inputs.size(); ++k) {
    if (!op.sources[k]) optional_inputs_.push_back(may_be_none(op.extra_inputs[k]));
  }
  has_optional_ |= std::ranges::any_of(op.extra_inputs, may_be_none) ||
                   std::ranges::any_of(op.parameters, may_be_none);
}

// ---- keys and plans

void Pipeline::write_key(at::TensorList tensors, const std::vector<bool>& training,
                         const Recipe* recipe, PlanKey& key) const {
  const auto device = tensors[0].device().type();
  key.grad_enabled = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  key.policies = policies_;
  key.device = to_device(device);
  key.autocast = autocast_dtype(device);
  key.recipe = recipe;
  key.tensors.clear();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      key.tensors.push_back({.is_absent = true});
      continue;
    }
    key.tensors.push_back(
        {to_dtype(tensor.scalar_type()), key.grad_enabled && tensor.requires_grad()});
  }
  add_training(training, key);
}

PlanKey Pipeline::key(bool grad_enabled, c10::DeviceType device,
                      std::optional<at::ScalarType> autocast, std::vector<TensorMeta> tensors,
                      const std::vector<bool>& training, const Recipe* recipe) const {
  PlanKey key{.grad_enabled = grad_enabled,
              .policies = policies_,
              .device = to_device(device),
              .recipe = recipe,
              .tensors = std::move(tensors)};
  if (autocast) key.autocast = to_dtype(*autocast);
  for (TensorMeta& tensor : key.tensors) tensor.requires_grad &= grad_enabled;
  add_training(training, key);
  return key;
}

const std::vector<int>& Pipeline::ask_training() const {
  return has_user_fusions() ? every_op_ : ask_training_;
}

void Pipeline::add_training(const std::vector<bool>& training, PlanKey& key) const {
  key.training.assign(ops_.size(), false);
  for (const int op : ask_training()) key.training[op] = training[op];
}

bool Pipeline::is_current(const CachedPlan& plan) const {
  return plan.version == registry_version() && plan.generation == generation_;
}

SharedPlan Pipeline::plan(const PlanKey& key) {
  if (SharedPlan found = find(key)) return found;
  // The lock is not held here, because planning may call the host language.
  SharedPlan made = make(key);
  add(made);
  return made;
}

SharedPlan Pipeline::find(const PlanKey& key) {
  std::vector<SharedPlan> stale;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto first_stale = std::stable_partition(
      plans_.begin(), plans_.end(), [&](const SharedPlan& plan) { return is_current(*plan); });
  stale.assign(std::make_move_iterator(first_stale), std::make_move_iterator(plans_.end()));
  plans_.erase(first_stale, plans_.end());
  const auto found =
      std::ranges::find_if(plans_, [&](const SharedPlan& plan) { return plan->key == key; });
  if (found == plans_.end()) return nullptr;
  std::rotate(found, found + 1, plans_.end());
  return plans_.back();
}

void Pipeline::add(const SharedPlan& plan) {
  SharedPlan evicted;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  if (!is_current(*plan)) return;
  plans_.push_back(plan);
  if (plans_.size() <= kCachedPlans) return;
  evicted = std::move(plans_.front());
  plans_.erase(plans_.begin());
}

SharedPlan Pipeline::make(const PlanKey& key) const {
  const int64_t version = registry_version(), generation = generation_;
  std::vector<OpNode> ops = ops_;
  const SharedPlan made = host_ ? host_->begin(ops) : std::make_shared<CachedPlan>();
  made->key = key;
  UserRewrite rewrite;
  UserPattern match;
  if (host_) {
    rewrite = [&](const Fusion& fusion, const std::vector<StepGroup>& groups) {
      return host_->rewrite(*made, fusion, groups);
    };
    match = [&](const Fusion& fusion, const std::vector<StepGroup>& groups) {
      return host_->match(*made, fusion, groups);
    };
  }
  PlanKey resolved = key;
  if (host_ && key.recipe && key.recipe->custom >= 0) {
    resolved.recipe = host_->resolve(*made, *key.recipe);
  }
  try {
    Planned planned = make_plan(ops, resolved, rewrite, match);
    made->plan = std::move(planned.plan);
    made->near_misses = std::move(planned.near_misses);
  } catch (const PlanError& error) {
    TORCH_CHECK(false, error.what());
  }
  made->version = version;
  made->generation = generation;
  Program program = compile(made->plan);
  if (host_) program.names = host_->names(*made);
  made->program = share(std::move(program));
  if (host_) host_->finish(made, key.device);
  return made;
}

std::vector<SharedPlan> Pipeline::plans() const {
  const std::lock_guard lock(mutex_);
  return plans_;
}

void Pipeline::forget_plans() {
  ++generation_;
  std::vector<SharedPlan> stale;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  stale.swap(plans_);
}

// ---- calls without a host language

std::vector<at::Tensor> Pipeline::operator()(const at::Tensor& input, at::TensorList parameters,
                                             at::TensorList extra_inputs) {
  TORCH_CHECK(extra_inputs.size() == extra_inputs_, "[Pipeline] extra_inputs must be ",
              extra_inputs_, ", got ", extra_inputs.size());
  TORCH_CHECK(parameters.size() == parameters_, "[Pipeline] parameters must be ", parameters_, " (",
              c10::Join(", ", parameter_names()), "), got ", parameters.size());
  std::vector<at::Tensor> tensors = {input};
  tensors.insert(tensors.end(), extra_inputs.begin(), extra_inputs.end());
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  TORCH_CHECK(input.defined(), "[Pipeline] input must be a tensor, got an undefined one");
  SharedPlan last;  // the previous plan is freed after the lock is released
  PlanKey key;
  write_key(tensors, std::vector<bool>(ops_.size(), is_training_), recipe_, key);
  const SharedPlan found = plan(key);
  last = found;
  {
    const std::lock_guard lock(mutex_);
    last_.swap(last);
  }
  drop_absent(tensors);
  scales_.add_states(found->plan, input.device(), tensors);
  return run(found->program, tensors);
}

void Pipeline::drop_absent(std::vector<at::Tensor>& tensors) const {
  if (has_optional_) std::erase_if(tensors, [](const auto& tensor) { return !tensor.defined(); });
}

void Pipeline::train(bool on) { is_training_ = on; }
void Pipeline::set_recipe(const Recipe* recipe) {
  TORCH_CHECK(recipe == nullptr || recipe->custom < 0,
              "[Pipeline] recipe must name its formats, got ", to_text(*recipe));
  recipe_ = recipe;
}

void Pipeline::update_scales(const ScaleUpdate& how) {
  const Recipe* const recipe = recipe_;
  TORCH_CHECK(recipe != nullptr && recipe->has_delayed(),
              "[Pipeline] recipe must have delayed scales where they are updated, got ",
              recipe == nullptr ? "none" : "'" + to_text(*recipe) + "'");
  scales_.update(how);
}

std::vector<std::string> Pipeline::parameter_names() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (!ops_[i].native) continue;
    for (const std::string& name : ops_[i].parameters) {
      names.push_back(std::to_string(i) + "." + name);
    }
  }
  return names;
}

std::shared_ptr<const CachedPlan> Pipeline::last_plan() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(last_ != nullptr, "[Pipeline] last_plan() must follow a call, got none so far");
  return last_;
}

}  // namespace transformer_ops
