#include "executor/frozen_weights.h"

#include <algorithm>
#include <memory>

#include "executor/saved.h"

namespace transformer_ops {
namespace {

thread_local int depth = 0;
thread_local std::unique_ptr<WeightCache> made;

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

void FrozenWeights::enter() {
  if (depth++ == 0) made = std::make_unique<WeightCache>();
}

void FrozenWeights::leave() {
  TORCH_CHECK(depth > 0, "[frozen_weights] region must be left by the thread that entered it, got ",
              "one that entered none");
  if (--depth == 0) made.reset();
}

WeightCache* WeightCache::current() { return made.get(); }

bool WeightCache::may_keep(const at::Tensor& weight) {
  return is_real(weight) && weight.is_leaf() && !weight.is_inference() &&
         !weight.key_set().has(c10::DispatchKey::Functionalize);
}

WeightCache::Known::Known(const at::Tensor& tensor)
    : tensor_(tensor.getIntrusivePtr()),
      data_(tensor.const_data_ptr()),
      version_(version_of(tensor)) {}

bool WeightCache::Known::is_object(const at::Tensor& tensor) const {
  return tensor_._unsafe_get_target() == tensor.unsafeGetTensorImpl() && !tensor_.expired();
}

bool WeightCache::Known::is(const at::Tensor& tensor) const {
  return is_object(tensor) && data_ == tensor.const_data_ptr();
}

std::vector<WeightCache::Known> WeightCache::Known::all(const Tensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

bool WeightCache::Row::is_of(const Tensors& tensors) const {
  return std::ranges::equal(weights, tensors,
                            [](const Known& known, auto& weight) { return known.is(weight); });
}

bool WeightCache::Row::has_objects(const Tensors& tensors) const {
  return std::ranges::equal(
      weights, tensors, [](const Known& known, auto& weight) { return known.is_object(weight); });
}

bool WeightCache::Row::is_gone() const {
  return std::ranges::any_of(weights, &Known::is_gone) ||
         std::ranges::any_of(states, &Known::is_gone);
}

const Tensors* WeightCache::find(const Call& call, const Tensors& weights, const Tensors& states,
                                 size_t count) const {
  const auto rows = rows_.find(weights[0].unsafeGetTensorImpl());
  if (rows == rows_.end()) return nullptr;
  for (const Row& row : rows->second) {
    if (!row.is_of(weights)) continue;
    for (size_t i = 0; i < weights.size(); ++i) {
      const uint32_t version = version_of(weights[i]), known = row.weights[i].version();
      TORCH_CHECK(version == known, call.weights[i].what,
                  " must not be modified within frozen_weights(), got version ", version,
                  " where it was rounded at version ", known);
    }
    const bool fits = row.key == call.key && row.results.size() >= count &&
                      std::ranges::equal(row.states, states, [](const Known& known, auto& state) {
                        return known.is(state) && known.version() == version_of(state);
                      });
    if (fits) return &row.results;
  }
  return nullptr;
}

void WeightCache::add(const Call& call, const Tensors& weights, const Tensors& states,
                      Tensors results) {
  if (rows_.size() >= swept_at_) forget_dead();
  std::vector<Row>& rows = rows_[weights[0].unsafeGetTensorImpl()];
  // Drops results of a weight or a scale whose memory was replaced.
  std::erase_if(rows, [&](const Row& old) {
    const bool is_old = old.has_objects(weights) && !old.is_of(weights);
    return is_old || !old.weights[0].is(weights[0]) || old.is_gone();
  });
  rows.push_back({call.key, Known::all(weights), Known::all(states), std::move(results)});
}

void WeightCache::forget_dead() {
  std::erase_if(rows_, [](const auto& entry) {
    return std::ranges::all_of(entry.second, [](const Row& row) { return row.is_gone(); });
  });
  swept_at_ = std::max(swept_at_, 2 * rows_.size());
}

}  // namespace transformer_ops
