#include "op/typed_op.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "fuser/fork_safe_mutex.h"
#include "fuser/quantize.h"
#include "fuser/round_results.h"
#include "fuser/schema.h"
#include "op/defaults.h"
#include "op/flops.h"
#include "op/frame.h"
#include "op/recompute.h"
#include "op/rounded.h"
#include "op/variant.h"

namespace transformer_ops {
namespace {

// The typed ops by name. The lock is for libraries loaded while others run; a row never moves.
struct TypedOps {
  ForkSafeMutex mutex;
  std::map<std::string, TypedOp> rows;
  std::vector<std::string> of_plans;  // the ops that have no schema in torch
};

TypedOps& typed_ops() {
  static TypedOps ops;
  return ops;
}

std::vector<std::pair<std::string, const TypedOp*>> all_typed_ops() {
  const std::lock_guard lock(typed_ops().mutex);
  std::vector<std::pair<std::string, const TypedOp*>> found;
  for (const auto& [name, op] : typed_ops().rows) found.emplace_back(name, &op);
  return found;
}

const TypedOp& add_typed_op(const std::string& name, TypedOp op) {
  const std::lock_guard lock(typed_ops().mutex);
  const auto [row, inserted] = typed_ops().rows.emplace(name, std::move(op));
  TORCH_CHECK(inserted, "[typed op] name must be new, got '", name, "'");
  return row->second;
}

// The forward and backward pairs. The lock is for libraries loaded while others run.
struct Pairs {
  ForkSafeMutex mutex;
  std::vector<TypedOpPair> rows;
};

Pairs& pairs() {
  static Pairs pairs;
  return pairs;
}

void add_traits(const std::string& name, const TypedOp& op) {
  set_traits(name, {.rounds = !op.by_rows.empty(), .reads_first = op.reads_first});
}

}  // namespace

void register_typed_op(TypedOp op) {
  const std::string name = parse_schema(op.schema).name;
  complete(op);
  check_products(op);
  check_by_rows(op);
  const TypedOp& kept = add_typed_op(name, std::move(op));
  add_to_torch(keep_variant(kept, name, {}));
  // These forms are for the passes of a plan, so they have no gradient.
  for (const Form form : forms_of(kept)) add_to_torch(keep_variant(kept, name, form));
  add_traits(name, kept);  // last: plans may call it from now on
}

void register_plan_op(TypedOp op) {
  const std::string name = parse_schema(op.schema).name;
  complete(op);
  check_by_rows(op);
  const TypedOp& kept = add_typed_op(name, std::move(op));
  keep_variant(kept, name, {});
  {
    const std::lock_guard lock(typed_ops().mutex);
    typed_ops().of_plans.push_back(name);
  }
  add_traits(name, kept);
}

std::vector<std::string> plan_ops() {
  const std::lock_guard lock(typed_ops().mutex);
  return typed_ops().of_plans;
}

std::vector<std::string> other_names(const std::string& name, const TypedOp& op) {
  std::vector<std::string> names;
  for (const Form form : forms_of(op)) names.push_back(name_of(name, form));
  return names;
}

std::vector<std::string> typed_ops_without_cuda() {
  std::vector<std::string> names;
  for (const auto& [name, op] : all_typed_ops()) {
    if (op->bodies.cpu && !op->bodies.cuda) names.push_back(name);
  }
  return names;
}

const TypedOp* find_typed_op(const std::string& name) {
  {
    const std::lock_guard lock(typed_ops().mutex);
    const auto row = typed_ops().rows.find(name);
    if (row != typed_ops().rows.end()) return &row->second;
  }
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos) return nullptr;
  const TypedOp* const op = find_typed_op(name.substr(0, dot));
  if (op == nullptr) return nullptr;
  const std::string suffix = name.substr(dot);
  auto form = suffix == kSaved ? saved_form(*op) : rounded_by(*op, suffix);
  if (!form) return nullptr;
  const std::lock_guard lock(typed_ops().mutex);
  return &typed_ops().rows.emplace(name, std::move(*form)).first->second;
}

std::vector<TypedOpPair> typed_op_pairs() {
  const std::lock_guard lock(pairs().mutex);
  return pairs().rows;
}

std::string forward_of(const std::string& backward) {
  const std::lock_guard lock(pairs().mutex);
  const auto row = std::ranges::find(pairs().rows, backward, &TypedOpPair::backward);
  return row == pairs().rows.end() ? std::string() : row->forward;
}

void add_typed_op_pair(TypedOpPair pair) {
  const std::lock_guard lock(pairs().mutex);
  pairs().rows.push_back(std::move(pair));
}

bool has_tangent(const Tensor& tensor) {
  // A fast answer for nearly every tensor: the full check takes 150 instructions.
  if (!tensor.defined()) return false;
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || (!meta->fw_grad_ && !meta->is_view_)) return false;
  return tensor._fw_grad(/*level=*/0).defined();
}

Tensors differentiate(c10::function_ref<Tensor(const Tensors&)> function, const Tensors& inputs,
                      const Tensor& grad_output) {
  // Kernel wrappers run without a graph, so their results need none.
  const bool keeps_graph = at::GradMode::is_enabled();
  const at::AutoGradMode grad_mode(true);
  Tensors leaves = inputs, wanted;
  for (Tensor& leaf : leaves) {
    if (!leaf.defined() || !at::isFloatingType(leaf.scalar_type())) continue;
    // The view makes the inner gradient stop here.
    leaf = leaf.requires_grad() ? leaf.view_as(leaf) : leaf.detach().requires_grad_();
    wanted.push_back(leaf);
  }
  if (wanted.empty()) return Tensors(inputs.size());
  const Tensors grads =
      torch::autograd::grad({function(leaves)}, wanted, {grad_output},
                            /*retain_graph=*/keeps_graph, /*create_graph=*/keeps_graph,
                            /*allow_unused=*/true);
  Tensors results;
  auto next = grads.begin();
  for (const Tensor& leaf : leaves) {
    const bool has_gradient = leaf.defined() && at::isFloatingType(leaf.scalar_type());
    results.push_back(has_gradient ? *next++ : Tensor());
  }
  return results;
}

}  // namespace transformer_ops
