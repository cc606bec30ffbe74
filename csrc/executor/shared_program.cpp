#include <c10/core/TensorImpl.h>

#include <mutex>
#include <unordered_map>

#include "executor/program.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

// The owners of all programs that live, by id.
struct Living {
  ForkSafeMutex mutex;
  std::unordered_map<uint64_t, c10::weak_intrusive_ptr<c10::TensorImpl>> owners;
};

Living& living() {
  // Never deleted: a node may die after every static object.
  static auto* const living = new Living;
  return *living;
}

void destroy(void* found) {
  auto* const program = static_cast<Program*>(found);
  {
    const std::lock_guard lock(living().mutex);
    living().owners.erase(program->id);
  }
  delete program;
}

}  // namespace

SharedProgram::SharedProgram(Program program) {
  auto* const made = new Program(std::move(program));
  c10::Storage storage(c10::Storage::use_byte_size_t(), /*size_bytes=*/0,
                       at::DataPtr(made, made, destroy, at::kCPU));
  owner_ = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                    c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    caffe2::TypeMeta::Make<uint8_t>());
  const std::lock_guard lock(living().mutex);
  living().owners.emplace(made->id, owner_.getIntrusivePtr());
}

SharedProgram SharedProgram::from(const Tensor& owner, uint64_t id) {
  if (owner.has_storage() && owner.storage().data_ptr().get_deleter() == &destroy) {
    return SharedProgram(owner);
  }
  const std::lock_guard lock(living().mutex);
  const auto row = living().owners.find(id);
  auto found = row == living().owners.end()
                   ? c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()
                   : c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
                         row->second.lock().release());
  TORCH_CHECK(found.defined(), "[run_plan] program must live as long as its backward, got id ", id);
  return SharedProgram(Tensor(std::move(found)));
}

}  // namespace transformer_ops
