// Records the largest magnitudes of the tensors that a call under delayed scaling has rounded.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <atomic>

#include "op/op.h"
#include "quantization/delayed_scaling.h"

namespace transformer_ops::ops::record_amax {
namespace {

using namespace transformer_ops::delayed_scaling;

// The number of groups for each operand.
int64_t groups_of(const Tensor& amax) { return amax.numel() / kPositions; }

void check_record(const Tensor& amax, const Tensor& found, int64_t position) {
  check_row("record_amax_", "amax", amax);
  check_position("record_amax_", position);
  TORCH_CHECK(found.numel() == groups_of(amax), "[record_amax_] found must hold ", groups_of(amax),
              " numbers, got shape ", found.sizes());
}

// The version of the buffer does not increase: no gradient depends on it, and tensors that autograd
// has saved may still be read.
void record_cpu(const Tensor& amax, const Tensor& found, int64_t position) {
  check_record(amax, found, position);
  const int64_t groups = groups_of(amax);
  auto* const known = amax.mutable_data_ptr<float>() + position * groups;
  for (int64_t group = 0; group < groups; ++group) {
    take_larger(std::atomic_ref(known[group]), found.const_data_ptr<float>()[group]);
  }
}

void record_in_aten(const Tensor& amax, const Tensor& found, int64_t position) {
  check_record(amax, found, position);
  const at::AutoDispatchBelowADInplaceOrView no_version;
  const Tensor known = amax.select(0, position);
  known.copy_(at::where((found > known).logical_or(found.isnan()), found, known));
}

void record_meta(const Tensor&, const Tensor&, int64_t) {}

TORCH_LIBRARY_FRAGMENT(transformer_ops, library) {
  library.def("record_amax_(Tensor(a!) amax, Tensor found, int position) -> ()",
              {at::Tag::pt2_compliant_tag});
  library.impl("record_amax_", c10::DispatchKey::CPU, TORCH_FN(record_cpu));
  library.impl("record_amax_", c10::DispatchKey::CUDA, TORCH_FN(record_in_aten));
  library.impl("record_amax_", c10::DispatchKey::Meta, TORCH_FN(record_meta));
}

}  // namespace
}  // namespace transformer_ops::ops::record_amax
