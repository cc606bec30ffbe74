// Handles of objects that autograd nodes own together with others. A node's saved data can own
// nothing but tensors where compiled autograd traces it, so an empty tensor does the counting.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace transformer_ops {
namespace handles {

// No two objects of the process share one.
uint64_t next_id();
at::Tensor make_owner(void* object, uint64_t id, void (*destroy)(void*));
// Undefined unless the object of this id lives.
at::Tensor find_owner(uint64_t id);
void forget(uint64_t id);

}  // namespace handles

// T has a `uint64_t id` from handles::next_id(). Its class is instantiated in one library alone,
// where `destroy` then has one address, by which from() knows an owner.
template <typename T>
class Handle {
 public:
  Handle() = default;
  explicit Handle(std::unique_ptr<T> object) {
    const uint64_t id = object->id;
    owner_ =
        handles::make_owner(const_cast<std::remove_const_t<T>*>(object.release()), id, destroy);
  }

  explicit operator bool() const { return owner_.defined(); }
  T& operator*() const {
    // Not mutable_data(), which looks for copies on write: this memory is the object itself.
    return *static_cast<T*>(
        const_cast<void*>(owner_.unsafeGetTensorImpl()->unsafe_storage().data()));
  }
  T* operator->() const { return &**this; }

  // What a node keeps, and the way back. A trace puts another tensor in the owner's place: there
  // the object is found by its id.
  const at::Tensor& owner() const { return owner_; }
  static Handle from(const at::Tensor& owner, uint64_t id) {
    if (owner.has_storage() && owner.storage().data_ptr().get_deleter() == &destroy) {
      return Handle(owner);
    }
    at::Tensor found = handles::find_owner(id);
    TORCH_CHECK(found.defined(), "[run_plan] what forward left must live as long as its backward, ",
                "got id ", id);
    return Handle(std::move(found));
  }

 private:
  template <typename>
  friend class WeakHandle;
  explicit Handle(at::Tensor owner) : owner_(std::move(owner)) {}

  static void destroy(void* found) {
    std::unique_ptr<T> object(static_cast<T*>(found));
    handles::forget(object->id);
  }

  at::Tensor owner_;
};

// Finds the object while others own it.
template <typename T>
class WeakHandle {
 public:
  WeakHandle() = default;
  WeakHandle(const Handle<T>& owned) : owner_(owned.owner().getIntrusivePtr()) {}

  Handle<T> lock() const {
    auto found = owner_.lock();
    return found ? Handle<T>(at::Tensor(std::move(found))) : Handle<T>();
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> owner_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

}  // namespace transformer_ops
