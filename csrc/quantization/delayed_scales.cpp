#include "quantization/delayed_scales.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "op/buffer.h"

namespace transformer_ops::delayed_scaling {
namespace {

using at::Tensor;
using Owners = c10::ArrayRef<Buffers*>;

int64_t count_of(Owners owners) {
  int64_t count = 0;
  for (const Buffers* one : owners) count += one->scale.numel();
  return count;
}

// ---- the magnitudes of calls

// Other threads may record numbers at the same time; these are taken now or by the next update.
float take(float& amax) {
  return std::atomic_ref(amax).exchange(kNothing, std::memory_order_relaxed);
}

Tensor take_amaxes_cpu(Owners owners) {
  Tensor met = empty({count_of(owners)}, at::kFloat, at::kCPU);
  auto* found = met.mutable_data_ptr<float>();
  for (const Buffers* owner : owners) {
    auto* const forward = owner->amax.mutable_data_ptr<float>();
    auto* const backward = owner->grad_amax.mutable_data_ptr<float>();
    for (int64_t k = 0; k < owner->amax.numel(); ++k) {
      const float one = take(forward[k]), other = take(backward[k]);
      const bool is_nan = std::isnan(one) || std::isnan(other);
      *found++ = is_nan ? std::numeric_limits<float>::infinity() : std::max(one, other);
    }
  }
  return met;
}

Tensor take_amaxes_in_aten(Owners owners) {
  const at::AutoDispatchBelowADInplaceOrView no_version;
  std::vector<Tensor> forward, backward;
  for (const Buffers* owner : owners) {
    forward.push_back(owner->amax.flatten());
    backward.push_back(owner->grad_amax.flatten());
  }
  const Tensor met = at::maximum(at::cat(forward), at::cat(backward));
  for (const auto& buffers : {forward, backward}) {
    for (const Tensor& buffer : buffers) buffer.fill_(kNothing);
  }
  return at::where(met.isnan(), std::numeric_limits<float>::infinity(), met);
}

// ---- histories

constexpr float kMost = std::numeric_limits<float>::max();

bool is_usable(float met) { return met >= 0 && met <= kMost; }

// The last `length` magnitudes of an op, the latest one first; each row has one for each scale.
struct History {
  float* first;
  int64_t length, count;

  // Adds the magnitudes of calls, if they are usable.
  void take(const float* met) const {
    if (std::all_of(met, met + count, is_usable)) {
      std::memmove(first + count, first, (length - 1) * count * sizeof(float));
      std::copy_n(met, count, first);
      return;
    }
    for (int64_t k = 0; k < count; ++k) {
      if (!is_usable(met[k])) continue;
      for (int64_t row = length - 1; row > 0; --row) {
        first[row * count + k] = first[(row - 1) * count + k];
      }
      first[k] = met[k];
    }
  }

  std::vector<float> largest() const {
    std::vector<float> best(count, 0.0f);
    int64_t done = 0;
    if (count == kPositions) done = keep_largest_threes(best.data());
    for (; done < length * count; done += count) {
      for (int64_t k = 0; k < count; ++k) best[k] = std::max(best[k], first[done + k]);
    }
    return best;
  }

 private:
  // The same in vectors of eight rows of three at a time; returns the number of magnitudes that
  // were processed. One by one, a history of 1024 took more time than everything else in a region.
  int64_t keep_largest_threes(float* best) const {
    constexpr int64_t kRows = 8, kWidth = kRows * kPositions;
    typedef float Lanes __attribute__((vector_size(16)));
    std::array<Lanes, kWidth / 4> lanes{};
    const int64_t whole = length / kRows * kWidth;
    for (int64_t i = 0; i < whole; i += kWidth) {
#pragma GCC unroll 6
      for (size_t j = 0; j < lanes.size(); ++j) {
        Lanes found;
        std::memcpy(&found, first + i + 4 * j, sizeof(found));
        lanes[j] = lanes[j] < found ? found : lanes[j];
      }
    }
    std::array<float, kWidth> all;
    std::memcpy(all.data(), lanes.data(), sizeof(all));
    for (size_t k = 0; k < all.size(); ++k)
      best[k % kPositions] = std::max(best[k % kPositions], all[k]);
    return whole;
  }
};

void next_scales_cpu(Owners owners, const float* met, int64_t margin, bool most_recent) {
  for (Buffers* owner : owners) {
    const int64_t count = owner->scale.numel(), groups = count / kPositions;
    const History history{owner->history.mutable_data_ptr<float>(), owner->history.size(0), count};
    history.take(met);
    auto next =
        most_recent ? std::vector<float>(history.first, history.first + count) : history.largest();
    const float* const known = owner->scale.const_data_ptr<float>();
    const float* const most = owner->largest.const_data_ptr<float>();
    for (int64_t k = 0; k < count; ++k) {
      const float amax = next[k];
      const float scale =
          std::ldexp(std::min(most[k / groups] / amax, kMost), -static_cast<int>(margin));
      const bool is_new = is_usable(met[k]) && amax > 0 && scale > 0 && scale <= kMost;
      next[k] = is_new ? scale : known[k];
    }
    // The largest of many calls rarely changes.
    if (!std::ranges::equal(next, std::span(known, count))) {
      owner->scale = empty(owner->scale.sizes(), at::kFloat, at::kCPU);
      std::ranges::copy(next, owner->scale.mutable_data_ptr<float>());
    }
    met += count;
  }
}

// The same without reading a number on the host.
void next_scales_in_aten(Owners owners, const Tensor& met, int64_t margin, bool most_recent) {
  int64_t first = 0;
  for (Buffers* owner : owners) {
    const Tensor &scale = owner->scale, &history = owner->history;
    const Tensor found = met.narrow(0, first, scale.numel()).view(scale.sizes());
    first += scale.numel();
    const Tensor is_new = (found >= 0).logical_and(found.isfinite());
    const Tensor later = at::cat({found.unsqueeze(0), history.narrow(0, 0, history.size(0) - 1)});
    history.copy_(at::where(is_new, later, history));
    const Tensor amax = most_recent ? history.select(0, 0) : at::amax(history, {0});
    const Tensor most = scale.dim() > 1 ? owner->largest.unsqueeze(-1) : owner->largest;
    const Tensor next =
        (most / amax).clamp_max(static_cast<double>(kMost)) * std::ldexp(1.0, -margin);
    const Tensor usable = is_new.logical_and(amax > 0).logical_and(next > 0);
    owner->scale = at::where(usable.logical_and(next.isfinite()), next, scale);
  }
}

void next_scales(Owners owners, const Tensor& met, int64_t margin, bool most_recent) {
  const int64_t count = count_of(owners);
  TORCH_CHECK(met.dim() == 1 && met.size(0) == count && met.scalar_type() == at::kFloat &&
                  met.is_contiguous(),
              "[autocast] reduced magnitudes must be a number for each scale, ", count,
              ", got shape ", met.sizes());
  if (met.is_cpu()) {
    next_scales_cpu(owners, met.const_data_ptr<float>(), margin, most_recent);
  } else {
    next_scales_in_aten(owners, met, margin, most_recent);
  }
}

}  // namespace

void check(const char* who, const Buffers& owner) {
  check_row(who, "fp8_scale", owner.scale);
  for (const auto& [name, amax] :
       {std::pair("fp8_amax", owner.amax), {"fp8_grad_amax", owner.grad_amax}}) {
    check_row(who, name, amax);
    TORCH_CHECK(amax.sizes() == owner.scale.sizes(), "[", who, "] ", name, " must have shape ",
                owner.scale.sizes(), ", as fp8_scale has, got ", amax.sizes());
  }
  check_row(who, "fp8_largest", owner.largest);
  TORCH_CHECK(owner.largest.dim() == 1, "[", who, "] fp8_largest must have shape [", kPositions,
              "], got ", owner.largest.sizes());
  const Tensor& history = owner.history;
  TORCH_CHECK(history.dim() == owner.scale.dim() + 1 && history.size(0) > 0 &&
                  history.sizes().slice(1) == owner.scale.sizes() &&
                  history.scalar_type() == at::kFloat && history.is_contiguous(),
              "[", who, "] fp8_amax_history must have rows of shape ", owner.scale.sizes(),
              " in float32, got ", history.scalar_type(), " of shape ", history.sizes());
  for (const Tensor* one : {&owner.amax, &owner.grad_amax, &owner.largest, &history}) {
    TORCH_CHECK(one->device() == owner.scale.device(), "[", who,
                "] buffers of delayed scaling must be on the device of fp8_scale, ",
                owner.scale.device(), ", got one on ", one->device());
  }
}

void update_scales(std::vector<Buffers>& all, int64_t margin, bool most_recent,
                   const std::function<void(Tensor&)>& reduce) {
  for (const Buffers& owner : all) check("autocast", owner);
  std::vector<bool> done(all.size());
  for (size_t first = 0; first < all.size(); ++first) {
    if (done[first]) continue;
    const c10::Device device = all[first].scale.device();
    std::vector<Buffers*> owners;
    for (size_t i = first; i < all.size(); ++i) {
      if (all[i].scale.device() != device) continue;
      owners.push_back(&all[i]);
      done[i] = true;
    }
    Tensor met = device.is_cpu() ? take_amaxes_cpu(owners) : take_amaxes_in_aten(owners);
    if (reduce) reduce(met);
    next_scales(owners, met, margin, most_recent);
  }
}

}  // namespace transformer_ops::delayed_scaling
