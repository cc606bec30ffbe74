#include "runtime/pipeline_scales.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <set>

#include "fuser/declaration.h"
#include "fuser/recipe.h"

namespace transformer_ops {
namespace {

using at::Tensor;
using delayed_scaling::Buffers;
using delayed_scaling::kNothing;
using delayed_scaling::kPositions;

constexpr std::pair<const char*, Tensor Buffers::*> kNames[] = {
    {"fp8_scale", &Buffers::scale},         {"fp8_amax", &Buffers::amax},
    {"fp8_grad_amax", &Buffers::grad_amax}, {"fp8_amax_history", &Buffers::history},
    {"fp8_largest", &Buffers::largest},
};

// Returns [3], or [3, groups].
std::vector<int64_t> shape_of(const Attributes& attributes) {
  const auto groups = attributes.find("num_groups");
  if (groups == attributes.end()) return {kPositions};
  return {kPositions, std::get<int64_t>(groups->second)};
}

// The formats of input, weight and gradient.
std::array<NumberFormat, kPositions> formats_of(const OperandFormats& formats) {
  return {formats.input, formats.weight, formats.grad_output};
}

Buffers make_buffers(const OperandFormats& formats, const std::vector<int64_t>& shape,
                     c10::Device device) {
  // Inference tensors would not allow later calls to write to them.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  const auto options = at::dtype(at::kFloat).device(device);
  std::vector<int64_t> rows = shape;
  rows.insert(rows.begin(), formats.history);
  std::vector<float> largest;
  for (const NumberFormat format : formats_of(formats)) largest.push_back(format.largest());
  return {.scale = at::full(shape, 1, options),
          .amax = at::full(shape, kNothing, options),
          .grad_amax = at::full(shape, kNothing, options),
          .history = at::full(rows, 0, options),
          .largest = at::tensor(largest, at::kFloat).to(device)};
}

// The recipe that the buffers belong to.
std::string recipe_in(const Buffers& buffers) {
  const Tensor largest = buffers.largest.cpu();
  OperandFormats formats{.history = buffers.history.size(0)};
  int64_t position = 0;
  for (NumberFormat* const format : {&formats.input, &formats.weight, &formats.grad_output}) {
    const float number = largest.const_data_ptr<float>()[position++];
    *format = NumberFormat::of_tensor(number);
    TORCH_CHECK(number == 0 || !format->is_exact(),
                "[Pipeline] fp8_largest must hold the largest numbers of formats, got ", number);
  }
  return to_text(Recipe{.all = formats});
}

// Converts "3.fp8_scale" to 3.
int op_of(const std::string& name, const std::vector<OpNode>& ops) {
  int op = -1;
  const size_t dot = std::min(name.find('.'), name.size());
  const auto [stop, error] = std::from_chars(name.data(), name.data() + dot, op);
  const bool is_number = error == std::errc() && stop == name.data() + dot;
  const bool is_there = is_number && op >= 0 && op < std::ssize(ops) && ops[op].native &&
                        !declaration(ops[op].kind).operands.empty();
  const bool is_name = std::ranges::any_of(kNames, [&](const auto& row) {
    return name.compare(std::min(dot + 1, name.size()), std::string::npos, row.first) == 0;
  });
  TORCH_CHECK(is_there && is_name,
              "[Pipeline] scales must be named 'op.name', for an op that takes "
              "rounded tensors, got '",
              name, "'");
  return op;
}

Buffers buffers_of(int op, const OpNode& node, const PipelineScales::Named& named) {
  Buffers buffers;
  for (const auto& [name, field] : kNames) {
    const std::string full = std::to_string(op) + "." + name;
    const auto found = named.find(full);
    TORCH_CHECK(found != named.end() && found->second.defined(),
                "[Pipeline] scales of an op must be set together, got none of ", full);
    // The clone is not shared with the caller, because calls and updates write to it.
    buffers.*field = found->second.detach().clone();
  }
  delayed_scaling::check("Pipeline", buffers);
  const std::vector<int64_t> shape = shape_of(node.attributes);
  TORCH_CHECK(buffers.scale.sizes() == at::IntArrayRef(shape), "[Pipeline] ", op,
              ".fp8_scale must have shape ", at::IntArrayRef(shape), ", got ",
              buffers.scale.sizes());
  return buffers;
}

Tensor Buffers::*field_of(const std::string& state) {
  return std::ranges::find(kNames, state, [](const auto& row) { return row.first; })->second;
}

}  // namespace

std::pair<PipelineScales::State, bool> PipelineScales::find(int op) const {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(op);
  return found == all_.end() ? std::pair<State, bool>({}, false) : std::pair(found->second, true);
}

PipelineScales::State PipelineScales::find_or_make(const Plan& plan, int op, c10::Device device) {
  const OperandFormats& formats = plan.recipe->of(op);
  const std::string recipe = to_text(Recipe{.all = formats});
  auto [kept, is_there] = find(op);
  if (!is_there) {
    // The lock is not held here: a fork takes all these locks, including that of the memory pool.
    State made{recipe, make_buffers(formats, shape_of(plan.ops[op].attributes), device)};
    const std::lock_guard lock(mutex_);
    kept = all_.try_emplace(op, std::move(made)).first->second;
  }
  TORCH_CHECK(kept.recipe == recipe, "[", plan.ops[op].kind, "] scales must be for the recipe '",
              recipe, "', got those for '", kept.recipe, "'; reset_scales() drops them");
  return kept;
}

void PipelineScales::add_states(const Plan& plan, c10::Device device, Tensors& tensors) {
  std::map<int, State> ops;
  for (const Value& state : plan.states) {
    auto found = ops.find(state.op);
    if (found == ops.end()) {
      found = ops.emplace(state.op, find_or_make(plan, state.op, device)).first;
    }
    tensors.push_back(found->second.buffers.*field_of(state.name));
  }
}

PipelineScales::All PipelineScales::copy() const {
  const std::lock_guard lock(mutex_);
  return all_;
}

void PipelineScales::update(const ScaleUpdate& how) {
  TORCH_CHECK(std::abs(how.margin) < 64, "[Pipeline] margin must be an integer below 64, got ",
              how.margin);
  const All before = copy();
  std::vector<Buffers> buffers;
  for (const auto& [op, kept] : before) buffers.push_back(kept.buffers);
  delayed_scaling::update_scales(buffers, how.margin, how.most_recent, how.reduce);
  const std::lock_guard lock(mutex_);
  auto updated = buffers.begin();
  for (const auto& [op, kept] : before) {
    const auto now = all_.find(op);
    // clear() may have run in between.
    const bool is_same = now != all_.end() && now->second.buffers.scale.is_same(kept.buffers.scale);
    if (is_same) std::swap(now->second.buffers.scale, updated->scale);
    ++updated;
  }
}

PipelineScales::Named PipelineScales::named() const {
  Named named;
  for (const auto& [op, kept] : copy()) {
    for (const auto& [name, field] : kNames) {
      named[std::to_string(op) + "." + name] = kept.buffers.*field;
    }
  }
  return named;
}

void PipelineScales::set(const std::vector<OpNode>& ops, const Named& named) {
  const c10::InferenceMode no_inference(false);
  std::set<int> given;
  for (const auto& [name, tensor] : named) given.insert(op_of(name, ops));
  All all;
  for (const int op : given) {
    Buffers buffers = buffers_of(op, ops[op], named);
    std::string recipe = recipe_in(buffers);
    all.emplace(op, State{std::move(recipe), std::move(buffers)});
  }
  const std::lock_guard lock(mutex_);
  all_.swap(all);
}

void PipelineScales::clear() {
  All all;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  all_.swap(all);
}

}  // namespace transformer_ops
