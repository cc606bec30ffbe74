// Delayed scaling: tensors rounded by a scale that is known before them, because it comes from the
// largest magnitudes of earlier ones. Whoever calls keeps these in buffers of its own:
//
//   scale  [3]   of input, weight and output gradient
//   amax   [3]   the largest magnitude of each since the scales were made; -1 where there was none
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "bodies/cpu.h"
#include "bodies/quantized.h"
#include "kernels/quantize.h"
#include "op/op.h"

namespace transformer_ops::ops::delayed_scaling {
namespace {

constexpr int64_t kPlaces = 3;
constexpr float kNothing = -1.0f;

void check_place(const char* op, int64_t place) {
  TORCH_CHECK(place >= 0 && place < kPlaces, "[", op, "] place must be 0, 1 or 2, got ", place);
}

const kernel::Format& scaled_format(const Checks& check, std::string_view name) {
  const kernel::Format& format = format_of(check, name);
  TORCH_CHECK(format.per_tensor(), "[", check.op(), "] format must have one scale for a tensor, ",
              "got '", name, "'");
  return format;
}

// ---- quantize_dequantize_scaled: the rounded tensor, and its largest magnitude

TensorSpecs scaled_shape(const Checks& check, const Tensor& input, const Tensor& scale,
                         int64_t place, std::string_view format, std::string_view dtype) {
  check.compute_dtype("input", input);
  check.spec("scale", scale, {{kPlaces}, at::kFloat});
  check_place(check.op(), place);
  scaled_format(check, format);
  TensorSpec spec = like(input);
  spec.dtype = dtype_named(check, dtype);
  return {spec, {{}, at::kFloat}};
}

// `record` is called with the largest magnitude of each part.
template <typename Record>
void round_by_scale(const kernel::Format& format, const Tensor& x, float scale,
                    const Tensor& output, const Record& record) {
  // Codes and numbers stay in the first cache.
  constexpr int64_t kPiece = 4096;
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto* const source = static_cast<const char*>(x.const_data_ptr());
  auto* const target = static_cast<char*>(output.mutable_data_ptr());
  const auto size = static_cast<int64_t>(x.element_size());
  const auto output_size = static_cast<int64_t>(output.element_size());
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    std::vector<char> codes(kPiece);
    float unused = 0;
    for (int64_t i = begin; i < end; i += kPiece) {
      const int64_t n = std::min(kPiece, end - i);
      cpu::quantize(format, from, source + i * size, scale, codes.data(), &unused, 1, n);
      cpu::dequantize(format, to, codes.data(), &unused, 1.0f / scale, target + i * output_size, 1,
                      n);
      record(from, source + i * size, n);
    }
  });
}

// NaN is larger than all numbers.
bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

void take_larger(std::atomic_ref<float> best, float found) {
  float known = best.load(std::memory_order_relaxed);
  while (is_larger(found, known) &&
         !best.compare_exchange_weak(known, found, std::memory_order_relaxed)) {
  }
}

void scaled_cpu(const Checks& check, const Tensor& x, const Tensor& scale, int64_t place,
                std::string_view format, std::string_view, Tensor& output, Tensor& amax) {
  auto& best = *amax.mutable_data_ptr<float>();
  best = 0;
  round_by_scale(scaled_format(check, format), x, scale.const_data_ptr<float>()[place], output,
                 [&](auto dtype, const void* part, int64_t n) {
                   take_larger(std::atomic_ref(best), cpu::largest(dtype, part, n));
                 });
}

std::tuple<Tensor, Tensor> scaled_meaning(const Checks& check, const Tensor& x, const Tensor& scale,
                                          int64_t place, std::string_view format,
                                          std::string_view dtype) {
  return round_by_scale_unfused(scaled_format(check, format), x, scale.select(0, place),
                                dtype_named(check, dtype));
}

// ---- the same in backward, of what forward rounded: behind a gradient, which keeps a compiler
// from doing it in forward

TensorSpecs saved_shape(const Checks& check, const Tensor&, const Tensor& input,
                        const Tensor& scale, int64_t place, std::string_view format,
                        std::string_view dtype) {
  return {scaled_shape(check, input, scale, place, format, dtype)[0]};
}

void saved_cpu(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
               int64_t place, std::string_view format, std::string_view, Tensor& output) {
  round_by_scale(scaled_format(check, format), x, scale.const_data_ptr<float>()[place], output,
                 [](auto, const void*, int64_t) {});
}

Tensor saved_meaning(const Checks& check, const Tensor&, const Tensor& x, const Tensor& scale,
                     int64_t place, std::string_view format, std::string_view dtype) {
  return std::get<0>(scaled_meaning(check, x, scale, place, format, dtype));
}

// ---- what writes to buffers

void check_amax(const char* op, const Tensor& amax) {
  TORCH_CHECK(amax.dim() == 1 && amax.size(0) == kPlaces && amax.scalar_type() == at::kFloat &&
                  amax.is_contiguous(),
              "[", op, "] amax must hold ", kPlaces, " numbers in float32, got ",
              amax.scalar_type(), " of shape ", amax.sizes());
}

// Does not raise the version of the buffer: no gradient depends on it, and what autograd has saved
// may still be read.
void record_cpu(const Tensor& amax, const Tensor& found, int64_t place) {
  check_amax("record_amax_", amax);
  check_place("record_amax_", place);
  take_larger(std::atomic_ref(amax.mutable_data_ptr<float>()[place]),
              *found.const_data_ptr<float>());
}

void record_in_aten(const Tensor& amax, const Tensor& found, int64_t place) {
  check_amax("record_amax_", amax);
  check_place("record_amax_", place);
  const at::AutoDispatchBelowADInplaceOrView no_version;
  const Tensor known = amax.select(0, place);
  known.copy_(at::where((found > known).logical_or(found.isnan()), found, known));
}

void record_meta(const Tensor&, const Tensor&, int64_t) {}

// ---- from region to region

// The larger ones of forward and backward as [ops, 3]; the buffers are then as new. Infinite in
// place of NaN, which not every reduction over processes knows to be larger than numbers.
Tensor take_amaxes_cpu(at::TensorList forward, at::TensorList backward) {
  const auto count = static_cast<int64_t>(forward.size());
  Tensor met = empty({count, kPlaces}, at::kFloat, at::kCPU);
  auto* const found = met.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    auto* const one = forward[i].mutable_data_ptr<float>();
    auto* const other = backward[i].mutable_data_ptr<float>();
    for (int64_t place = 0; place < kPlaces; ++place) {
      const float larger = is_larger(one[place], other[place]) ? one[place] : other[place];
      found[i * kPlaces + place] =
          std::isnan(larger) ? std::numeric_limits<float>::infinity() : larger;
      one[place] = other[place] = kNothing;
    }
  }
  return met;
}

Tensor take_amaxes(at::TensorList forward, at::TensorList backward) {
  TORCH_CHECK(forward.size() == backward.size(), "[take_amaxes_] backward must be as many as ",
              "forward, ", forward.size(), ", got ", backward.size());
  for (const auto& buffers : {forward, backward}) {
    for (const Tensor& buffer : buffers) check_amax("take_amaxes_", buffer);
  }
  const bool is_cpu = !forward.empty() &&
                      std::ranges::all_of(forward, [](auto& t) { return t.is_cpu(); }) &&
                      std::ranges::all_of(backward, [](auto& t) { return t.is_cpu(); });
  if (is_cpu) return take_amaxes_cpu(forward, backward);
  const at::AutoDispatchBelowADInplaceOrView no_version;
  const Tensor met = at::maximum(at::stack(forward), at::stack(backward));
  for (const auto& buffers : {forward, backward}) {
    for (const Tensor& buffer : buffers) buffer.fill_(kNothing);
  }
  return at::where(met.isnan(), std::numeric_limits<float>::infinity(), met);
}

constexpr float kMost = std::numeric_limits<float>::max();

// Of one place of an op: takes what was met into its column of the history; the next scale.
float next_scale(float met, float* history, int64_t length, float scale, float largest, int margin,
                 bool most_recent) {
  if (!(met >= 0 && met <= kMost)) return scale;
  float amax = met;
  for (int64_t row = length - 1; row > 0; --row) {
    history[row * kPlaces] = history[(row - 1) * kPlaces];
    if (!most_recent) amax = std::max(amax, history[row * kPlaces]);
  }
  history[0] = met;
  const float next = std::ldexp(std::min(largest / amax, kMost), -margin);
  return amax > 0 && next > 0 && next <= kMost ? next : scale;
}

// Scales are new tensors: what backward has saved is what forward used.
Tensors next_scales_cpu(const Tensor& met, at::TensorList histories, at::TensorList scales,
                        at::TensorList largest, int64_t margin, bool most_recent) {
  Tensors next;
  for (size_t i = 0; i < scales.size(); ++i) {
    next.push_back(at::empty_like(scales[i]));
    for (int64_t place = 0; place < kPlaces; ++place) {
      next[i].mutable_data_ptr<float>()[place] = next_scale(
          met.const_data_ptr<float>()[i * kPlaces + place],
          histories[i].mutable_data_ptr<float>() + place, histories[i].size(0),
          scales[i].const_data_ptr<float>()[place], largest[i].const_data_ptr<float>()[place],
          static_cast<int>(margin), most_recent);
    }
  }
  return next;
}

// The same without reading a number on the host.
Tensors next_scales_in_aten(const Tensor& met, at::TensorList histories, at::TensorList scales,
                            at::TensorList largest, int64_t margin, bool most_recent) {
  Tensors next;
  for (size_t i = 0; i < scales.size(); ++i) {
    const Tensor found = met.select(0, static_cast<int64_t>(i)), &history = histories[i];
    const Tensor is_new = (found >= 0).logical_and(found.isfinite());
    const Tensor later = at::cat({found.unsqueeze(0), history.narrow(0, 0, history.size(0) - 1)});
    history.copy_(at::where(is_new, later, history));
    const Tensor amax = most_recent ? history.select(0, 0) : at::amax(history, {0});
    const Tensor scale =
        (largest[i] / amax).clamp_max(static_cast<double>(kMost)) * std::ldexp(1.0, -margin);
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
  for (size_t i = 0; i < count; ++i) {
    check_amax(kOp, scales[i]);
    check_amax(kOp, largest[i]);
    const Tensor& history = histories[i];
    TORCH_CHECK(history.dim() == 2 && history.size(0) > 0 && history.size(1) == kPlaces &&
                    history.scalar_type() == at::kFloat && history.is_contiguous(),
                "[", kOp, "] history must have rows of ", kPlaces, " numbers in float32, got ",
                history.scalar_type(), " of shape ", history.sizes());
  }
  TORCH_CHECK(met.dim() == 2 && met.size(0) == static_cast<int64_t>(count) &&
                  met.size(1) == kPlaces && met.scalar_type() == at::kFloat && met.is_contiguous(),
              "[", kOp, "] met must have a row for each scale, got shape ", met.sizes());
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

[[maybe_unused]] const bool registered = [] {
  register_typed_op({.schema = "quantize_dequantize_scaled(Tensor input, Tensor scale, int place, "
                               "str format, str dtype) -> (Tensor output, Tensor amax)",
                     .shape = scaled_shape,
                     .bodies = {scaled_cpu, scaled_meaning, scaled_meaning},
                     .differentiable = false});
  register_typed_op({.schema = "quantize_dequantize_scaled_saved(Tensor grad_output, Tensor input, "
                               "Tensor scale, int place, str format, str dtype) -> Tensor output",
                     .shape = saved_shape,
                     .bodies = {saved_cpu, saved_meaning, saved_meaning},
                     .reads_first = false,
                     .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops::ops::delayed_scaling
