// Handles of objects that autograd nodes and others share. The saved data of a node can own only
// tensors if compiled autograd is to trace it, so an empty tensor does the reference counting.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace transformer_ops {
namespace handles {

// Every object of the process has a different id.
uint64_t next_id();
at::Tensor make_owner(void* object, uint64_t id, void (*destroy)(void*));
// Returns an undefined tensor if no object with this id exists.
at::Tensor find_owner(uint64_t id);
void forget(uint64_t id);

}  // namespace handles

// T must have a `uint64_t id` from handles::next_id(). Its class must be instantiated in one
// library only: `destroy` then has one address, by which from() recognizes an owner.
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
    // mutable_data() would look for copy-on-write, but this memory is the object itself.
    return *static_cast<T*>(
        const_cast<void*>(owner_.unsafeGetTensorImpl()->unsafe_storage().data()));
  }
  T* operator->() const { return &**this; }

  // Conversion to and from what a node saves. A trace replaces the owner by another tensor; the
  // object is then found by its id.
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

// Finds the object as long as others own it.
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
