// cuBLASLt's part of the emulated library.
#include "gemm.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "interpret.h"

namespace transformer_ops::cuda {
namespace {

constexpr size_t kMostSeen = 64;

std::mutex mutex;
std::atomic<bool> of_codes = true, of_blocks = true, of_mx = true;
std::vector<GemmPlan> seen;

}  // namespace

std::vector<GemmPlan> take_products() {
  const std::lock_guard lock(mutex);
  return std::exchange(seen, {});
}

void set_multiplies_codes(bool value) { of_codes = value; }
void set_multiplies_blocks(bool value) { of_blocks = value; }
void set_multiplies_mx(bool value) { of_mx = value; }

bool entry::multiplies_codes() { return of_codes; }
bool entry::multiplies_blocks() { return of_blocks; }
bool entry::multiplies_mx() { return of_mx; }

bool entry::gemm(Stream, const Gemm& gemm) {
  const auto plan = plan_gemm(gemm);
  if (!plan || (plan->problem.a_codes != Codes::None && !of_codes)) return false;
  const bool is_mx = plan->problem.a_scaling == Scaling::Vectors32;
  if (has_blocks(plan->problem) && !(is_mx ? of_mx : of_blocks)) return false;
  interpret(*plan);
  const std::lock_guard lock(mutex);
  if (seen.size() == kMostSeen) seen.clear();
  seen.push_back(*plan);
  return true;
}

TRANSFORMER_OPS_KERNEL(multiplies_codes, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_blocks, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_mx, "cuda");
TRANSFORMER_OPS_KERNEL(gemm, "cuda");

}  // namespace transformer_ops::cuda
