#include "executor/preflight.h"

#include <algorithm>
#include <unordered_map>

#include "executor/saved.h"

namespace transformer_ops {
namespace {

// the number of programs whose last sizes a thread remembers
constexpr size_t kRemembered = 64;

void append_sizes(const Tensor& tensor, std::vector<int64_t>& signature) {
  signature.push_back(static_cast<int64_t>(tensor.scalar_type()));
  signature.push_back(tensor.dim());
  signature.insert(signature.end(), tensor.sizes().begin(), tensor.sizes().end());
}

}  // namespace

void preflight(const Program& program, at::TensorList tensors) {
  static thread_local std::unordered_map<uint64_t, std::vector<int64_t>> passed;
  // The meta device would hide that tensors are on different devices.
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.device() == tensors[0].device(),
                "[run_plan] tensors must be on one device, got ", tensors[0].device(), " and ",
                tensor.device());
  }
  // Fake tensors and proxies check while they are traced, and draw no numbers.
  if (!std::ranges::all_of(tensors, is_real)) return;
  std::vector<int64_t> signature;
  for (const Tensor& tensor : tensors) append_sizes(tensor, signature);
  if (passed.size() > kRemembered) passed.clear();
  std::vector<int64_t>& last = passed[program.id];
  if (last == signature) return;
  run_on_meta(program, tensors);
  last = std::move(signature);
}

}  // namespace transformer_ops
