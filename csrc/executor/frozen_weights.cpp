#include "executor/frozen_weights.h"

#include <algorithm>
#include <memory>

#include "executor/saved.h"

namespace transformer_ops {
namespace {

thread_local int depth = 0;
thread_local std::unique_ptr<MadeOfWeights> made;

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

void FrozenWeights::enter() {
  if (depth++ == 0) made = std::make_unique<MadeOfWeights>();
}

void FrozenWeights::leave() {
  TORCH_CHECK(depth > 0, "[frozen_weights] region must be left by the thread that entered it, got ",
              "one that entered none");
  if (--depth == 0) made.reset();
}

MadeOfWeights* MadeOfWeights::current() { return made.get(); }

bool MadeOfWeights::may_keep(const at::Tensor& weight) {
  return is_real(weight) && weight.is_leaf() && !weight.is_inference() &&
         !weight.key_set().has(c10::DispatchKey::Functionalize);
}

MadeOfWeights::Known::Known(const at::Tensor& tensor)
    : tensor_(tensor.getIntrusivePtr()),
      data_(tensor.const_data_ptr()),
      version_(version_of(tensor)) {}

bool MadeOfWeights::Known::is(const at::Tensor& tensor) const {
  return tensor_._unsafe_get_target() == tensor.unsafeGetTensorImpl() && !tensor_.expired() &&
         data_ == tensor.const_data_ptr();
}

const Tensors* MadeOfWeights::find(const Call& call, const at::Tensor& weight,
                                   const Tensors& states, size_t count) const {
  const auto rows = rows_.find(weight.unsafeGetTensorImpl());
  if (rows == rows_.end()) return nullptr;
  for (const Row& row : rows->second) {
    if (!row.weight.is(weight)) continue;
    TORCH_CHECK(row.weight.version() == version_of(weight), call.what,
                " must not be modified within frozen_weights(), got version ", version_of(weight),
                " where it was rounded at version ", row.weight.version());
    const bool fits = row.key == call.key && row.results.size() >= count &&
                      std::ranges::equal(row.states, states, [](const Known& known, auto& state) {
                        return known.is(state) && known.version() == version_of(state);
                      });
    if (fits) return &row.results;
  }
  return nullptr;
}

void MadeOfWeights::add(const Call& call, const at::Tensor& weight, const Tensors& states,
                        Tensors results) {
  if (rows_.size() >= swept_at_) forget_dead();
  Row row{call.key, Known(weight), {}, std::move(results)};
  for (const at::Tensor& state : states) row.states.emplace_back(state);
  std::vector<Row>& rows = rows_[weight.unsafeGetTensorImpl()];
  // What was put in the place of a weight or a scale leaves those of the old one.
  std::erase_if(rows, [&](const Row& old) {
    return !old.weight.is(weight) || std::ranges::any_of(old.states, &Known::is_gone);
  });
  rows.push_back(std::move(row));
}

void MadeOfWeights::forget_dead() {
  std::erase_if(rows_, [](const auto& entry) {
    return std::ranges::all_of(entry.second, [](const Row& row) { return row.weight.is_gone(); });
  });
  swept_at_ = std::max(swept_at_, 2 * rows_.size());
}

}  // namespace transformer_ops
