// cuBLASLt's part of the emulated library.
#include "gemm.h"

#include <mutex>
#include <utility>

#include "interpret.h"

namespace transformer_ops::cuda {
namespace {

constexpr size_t kMostSeen = 64;

std::mutex mutex;
std::vector<GemmPlan> seen;

}  // namespace

std::vector<GemmPlan> take_products() {
  const std::lock_guard lock(mutex);
  return std::exchange(seen, {});
}

bool entry::gemm(Stream, const Gemm& gemm) {
  const auto plan = plan_gemm(gemm);
  if (!plan) return false;
  interpret(*plan);
  const std::lock_guard lock(mutex);
  if (seen.size() == kMostSeen) seen.clear();
  seen.push_back(*plan);
  return true;
}

TRANSFORMER_OPS_KERNEL(gemm, "cuda");

}  // namespace transformer_ops::cuda
