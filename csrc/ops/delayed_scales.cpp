// What delayed scaling keeps from call to call, and from region to region.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bodies/delayed_scaling.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops::ops::delayed_scales {
namespace {

using namespace transformer_ops::delayed_scaling;

// ---- what writes to buffers

void check_amax(const char* op, const Tensor& amax) {
  TORCH_CHECK((amax.dim() == 1 || amax.dim() == 2) && amax.size(0) == kPlaces &&
                  amax.scalar_type() == at::kFloat && amax.is_contiguous(),
              "[", op, "] amax must hold ", kPlaces, " rows in float32, got ", amax.scalar_type(),
              " of shape ", amax.sizes());
}

// How many there are at each place.
int64_t groups_of(const Tensor& amax) { return amax.numel() / kPlaces; }

void check_record(const Tensor& amax, const Tensor& found, int64_t place) {
  check_amax("record_amax_", amax);
  check_place("record_amax_", place);
  TORCH_CHECK(found.numel() == groups_of(amax), "[record_amax_] found must hold ", groups_of(amax),
              " numbers, got shape ", found.sizes());
}

// Does not raise the version of the buffer: no gradient depends on it, and what autograd has saved
// may still be read.
void record_cpu(const Tensor& amax, const Tensor& found, int64_t place) {
  check_record(amax, found, place);
  const int64_t groups = groups_of(amax);
  auto* const known = amax.mutable_data_ptr<float>() + place * groups;
  for (int64_t group = 0; group < groups; ++group) {
    take_larger(std::atomic_ref(known[group]), found.const_data_ptr<float>()[group]);
  }
}

void record_in_aten(const Tensor& amax, const Tensor& found, int64_t place) {
  check_record(amax, found, place);
  const at::AutoDispatchBelowADInplaceOrView no_version;
  const Tensor known = amax.select(0, place);
  known.copy_(at::where((found > known).logical_or(found.isnan()), found, known));
}

void record_meta(const Tensor&, const Tensor&, int64_t) {}

// ---- from region to region

// The larger ones of forward and backward, of one op behind another; the buffers are then as new.
// Infinite in place of NaN, which not every reduction over processes knows to be larger than
// numbers.
Tensor take_amaxes_cpu(at::TensorList forward, at::TensorList backward, int64_t count) {
  Tensor met = empty({count}, at::kFloat, at::kCPU);
  auto* found = met.mutable_data_ptr<float>();
  for (size_t i = 0; i < forward.size(); ++i) {
    auto* const one = forward[i].mutable_data_ptr<float>();
    auto* const other = backward[i].mutable_data_ptr<float>();
    for (int64_t k = 0; k < forward[i].numel(); ++k) {
      const float larger = is_larger(one[k], other[k]) ? one[k] : other[k];
      *found++ = std::isnan(larger) ? std::numeric_limits<float>::infinity() : larger;
      one[k] = other[k] = kNothing;
    }
  }
  return met;
}

Tensor in_one(at::TensorList buffers) {
  Tensors parts;
  for (const Tensor& buffer : buffers) parts.push_back(buffer.flatten());
  return at::cat(parts);
}

Tensor take_amaxes(at::TensorList forward, at::TensorList backward) {
  constexpr const char* kOp = "take_amaxes_";
  TORCH_CHECK(!forward.empty() && forward.size() == backward.size(), "[", kOp,
              "] backward must be as many as forward, ", forward.size(), ", and one at least, got ",
              backward.size());
  int64_t count = 0;
  for (size_t i = 0; i < forward.size(); ++i) {
    for (const auto& buffers : {forward, backward}) check_amax(kOp, buffers[i]);
    TORCH_CHECK(forward[i].sizes() == backward[i].sizes(), "[", kOp, "] backward must have shape ",
                forward[i].sizes(), ", got ", backward[i].sizes());
    count += forward[i].numel();
  }
  const auto are_cpu = [](at::TensorList all) {
    return std::ranges::all_of(all, [](auto& t) { return t.is_cpu(); });
  };
  if (are_cpu(forward) && are_cpu(backward)) return take_amaxes_cpu(forward, backward, count);
  const at::AutoDispatchBelowADInplaceOrView no_version;
  const Tensor met = at::maximum(in_one(forward), in_one(backward));
  for (const auto& buffers : {forward, backward}) {
    for (const Tensor& buffer : buffers) buffer.fill_(kNothing);
  }
  return at::where(met.isnan(), std::numeric_limits<float>::infinity(), met);
}

constexpr float kMost = std::numeric_limits<float>::max();

bool is_usable(float met) { return met >= 0 && met <= kMost; }

// The last `length` magnitudes of an op, the latest first; each row has one for each scale.
struct History {
  float* first;
  int64_t length, count;

  // Takes in what was met, where that is usable.
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

  // Several rows at a time, so that the inner loop runs in vectors.
  std::vector<float> largest() const {
    const int64_t width = 16 * count, whole = length * count / width * width;
    std::vector<float> best(width, 0.0f);
    for (int64_t i = 0; i < whole; i += width) {
      for (int64_t k = 0; k < width; ++k) best[k] = std::max(best[k], first[i + k]);
    }
    for (int64_t i = whole; i < length * count; ++i) {
      best[i - whole] = std::max(best[i - whole], first[i]);
    }
    for (int64_t k = count; k < width; ++k) best[k % count] = std::max(best[k % count], best[k]);
    return best;
  }
};

// Scales are new tensors: what backward has saved is what forward used.
Tensors next_scales_cpu(const Tensor& met, at::TensorList histories, at::TensorList scales,
                        at::TensorList largest, int64_t margin, bool most_recent) {
  Tensors next;
  const float* found = met.const_data_ptr<float>();
  for (size_t i = 0; i < scales.size(); ++i) {
    const int64_t count = scales[i].numel(), groups = groups_of(scales[i]);
    const History history{histories[i].mutable_data_ptr<float>(), histories[i].size(0), count};
    history.take(found);
    const auto amax =
        most_recent ? std::vector<float>(history.first, history.first + count) : history.largest();
    next.push_back(empty(scales[i].sizes(), at::kFloat, at::kCPU));
    auto* const to = next[i].mutable_data_ptr<float>();
    const float* const known = scales[i].const_data_ptr<float>();
    const float* const most = largest[i].const_data_ptr<float>();
    for (int64_t k = 0; k < count; ++k) {
      const float scale =
          std::ldexp(std::min(most[k / groups] / amax[k], kMost), -static_cast<int>(margin));
      const bool is_new = is_usable(found[k]) && amax[k] > 0 && scale > 0 && scale <= kMost;
      to[k] = is_new ? scale : known[k];
    }
    found += count;
  }
  return next;
}

// The same without reading a number on the host.
Tensors next_scales_in_aten(const Tensor& met, at::TensorList histories, at::TensorList scales,
                            at::TensorList largest, int64_t margin, bool most_recent) {
  Tensors next;
  int64_t first = 0;
  for (size_t i = 0; i < scales.size(); ++i) {
    const Tensor found = met.narrow(0, first, scales[i].numel()).view(scales[i].sizes());
    const Tensor& history = histories[i];
    first += scales[i].numel();
    const Tensor is_new = (found >= 0).logical_and(found.isfinite());
    const Tensor later = at::cat({found.unsqueeze(0), history.narrow(0, 0, history.size(0) - 1)});
    history.copy_(at::where(is_new, later, history));
    const Tensor amax = most_recent ? history.select(0, 0) : at::amax(history, {0});
    const Tensor most = scales[i].dim() > 1 ? largest[i].unsqueeze(-1) : largest[i];
    const Tensor scale =
        (most / amax).clamp_max(static_cast<double>(kMost)) * std::ldexp(1.0, -margin);
    const Tensor usable = is_new.logical_and(amax > 0).logical_and(scale > 0);
    next.push_back(at::where(usable.logical_and(scale.isfinite()), scale, scales[i]));
  }
  return next;
}

Tensors next_scales(const Tensor& met, at::TensorList histories, at::TensorList scales,
                    at::TensorList largest, int64_t margin, bool most_recent) {
  constexpr const char* kOp = "next_scales_";
  const size_t count = scales.size();
  TORCH_CHECK(histories.size() == count && largest.size() == count, "[", kOp,
              "] histories and largest must be as many as scales, ", count, ", got ",
              histories.size(), " and ", largest.size());
  int64_t numbers = 0;
  for (size_t i = 0; i < count; ++i) {
    check_amax(kOp, scales[i]);
    check_amax(kOp, largest[i]);
    TORCH_CHECK(largest[i].dim() == 1, "[", kOp, "] largest must have shape [", kPlaces, "], got ",
                largest[i].sizes());
    const Tensor& history = histories[i];
    TORCH_CHECK(history.dim() == scales[i].dim() + 1 && history.size(0) > 0 &&
                    history.sizes().slice(1) == scales[i].sizes() &&
                    history.scalar_type() == at::kFloat && history.is_contiguous(),
                "[", kOp, "] history must have rows of shape ", scales[i].sizes(),
                " in float32, got ", history.scalar_type(), " of shape ", history.sizes());
    numbers += scales[i].numel();
  }
  TORCH_CHECK(met.dim() == 1 && met.size(0) == numbers && met.scalar_type() == at::kFloat &&
                  met.is_contiguous(),
              "[", kOp, "] met must have a number for each scale, ", numbers, ", got shape ",
              met.sizes());
  const auto run = met.is_cpu() ? next_scales_cpu : next_scales_in_aten;
  return run(met, histories, scales, largest, margin, most_recent);
}

TORCH_LIBRARY_FRAGMENT(transformer_ops, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def("record_amax_(Tensor(a!) amax, Tensor found, int place) -> ()", tags);
  library.impl("record_amax_", c10::DispatchKey::CPU, TORCH_FN(record_cpu));
  library.impl("record_amax_", c10::DispatchKey::CUDA, TORCH_FN(record_in_aten));
  library.impl("record_amax_", c10::DispatchKey::Meta, TORCH_FN(record_meta));
  library.def("take_amaxes_(Tensor(a!)[] forward, Tensor(b!)[] backward) -> Tensor", tags);
  library.impl("take_amaxes_", c10::DispatchKey::CPU, TORCH_FN(take_amaxes));
  library.impl("take_amaxes_", c10::DispatchKey::CUDA, TORCH_FN(take_amaxes));
  library.def(
      "next_scales_(Tensor met, Tensor(a!)[] histories, Tensor[] scales, Tensor[] largest, "
      "int margin, bool most_recent) -> Tensor[]",
      tags);
  library.impl("next_scales_", c10::DispatchKey::CPU, TORCH_FN(next_scales));
  library.impl("next_scales_", c10::DispatchKey::CUDA, TORCH_FN(next_scales));
}

}  // namespace
}  // namespace transformer_ops::ops::delayed_scales
