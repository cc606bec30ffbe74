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
std::atomic<bool> of_codes = true, of_blocks = true, of_mx = true, of_nvfp4 = true,
                  of_groups = true;
std::vector<GemmPlan> seen;

}  // namespace

std::vector<GemmPlan> take_products() {
  const std::lock_guard lock(mutex);
  return std::exchange(seen, {});
}

void set_multiplies_codes(bool value) { of_codes = value; }
void set_multiplies_blocks(bool value) { of_blocks = value; }
void set_multiplies_mx(bool value) { of_mx = value; }
void set_multiplies_nvfp4(bool value) { of_nvfp4 = value; }
void set_multiplies_groups(bool value) { of_groups = value; }

bool entry::multiplies_codes() { return of_codes; }
bool entry::multiplies_blocks() { return of_blocks; }
bool entry::multiplies_mx() { return of_mx; }
bool entry::multiplies_nvfp4() { return of_nvfp4; }
bool entry::multiplies_groups() { return of_groups; }

bool entry::gemm(Stream, const Gemm& gemm) {
  const auto plan = plan_gemm(gemm);
  if (!plan || (plan->problem.a_codes != Codes::None && !of_codes)) return false;
  const Scaling scaling = plan->problem.a_scaling;
  const bool has_such = scaling == Scaling::Vectors32   ? of_mx
                        : scaling == Scaling::Vectors16 ? of_nvfp4
                                                        : of_blocks;
  if (has_blocks(plan->problem) && !has_such) return false;
  interpret(*plan);
  const std::lock_guard lock(mutex);
  if (seen.size() == kMostSeen) seen.clear();
  seen.push_back(*plan);
  return true;
}

TRANSFORMER_OPS_KERNEL(multiplies_codes, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_blocks, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_mx, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_nvfp4, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_groups, "cuda");
TRANSFORMER_OPS_KERNEL(gemm, "cuda");

}  // namespace transformer_ops::cuda
