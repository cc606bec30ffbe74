#include "executor/main_grad_passes.h"

#include <mutex>
#include <unordered_map>

#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

struct Passes {
  ForkSafeMutex mutex;
  std::unordered_map<int64_t, uint64_t> last;
};

// It is never deleted, because a thread may run while static objects are destroyed.
Passes& passes = *new Passes;

}  // namespace

uint64_t last_pass_of(int64_t buffer) {
  const std::lock_guard lock(passes.mutex);
  const auto found = passes.last.find(buffer);
  return found == passes.last.end() ? 0 : found->second;
}

void note_pass_of(int64_t buffer, uint64_t pass) {
  const std::lock_guard lock(passes.mutex);
  passes.last[buffer] = pass;
}

void forget_passes_of(int64_t buffer) {
  const std::lock_guard lock(passes.mutex);
  passes.last.erase(buffer);
}

}  // namespace transformer_ops
