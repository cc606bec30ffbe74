#include "executor/handle.h"

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "fuser/fork_safe_mutex.h"

namespace transformer_ops::handles {
namespace {

struct Living {
  ForkSafeMutex mutex;
  std::unordered_map<uint64_t, c10::weak_intrusive_ptr<c10::TensorImpl>> owners;
};

// It is never deleted, because a node may be destroyed after every static object.
Living& living = *new Living;

}  // namespace

uint64_t next_id() {
  static std::atomic<uint64_t> next = 0;
  return next++;
}

at::Tensor make_owner(void* object, uint64_t id, void (*destroy)(void*)) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), /*size_bytes=*/0,
                       at::DataPtr(object, object, destroy, at::kCPU));
  at::Tensor owner = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<uint8_t>());
  const std::lock_guard lock(living.mutex);
  living.owners.emplace(id, owner.getIntrusivePtr());
  return owner;
}

at::Tensor find_owner(uint64_t id) {
  const std::lock_guard lock(living.mutex);
  const auto row = living.owners.find(id);
  if (row == living.owners.end()) return {};
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
      row->second.lock().release()));
}

void forget(uint64_t id) {
  const std::lock_guard lock(living.mutex);
  living.owners.erase(id);
}

}  // namespace transformer_ops::handles
