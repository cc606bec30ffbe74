// Weights that do not change for a while, by promise of the caller: what is made of a weight alone
// is made once.
#pragma once

#include <c10/core/TensorImpl.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "executor/host.h"

namespace transformer_ops {

// While one is alive, calls of its thread, forward and backward, round each weight once for each
// format. They may lie within each other; what was made dies with the outermost one.
class FrozenWeights {
 public:
  FrozenWeights() { enter(); }
  ~FrozenWeights() { leave(); }
  FrozenWeights(const FrozenWeights&) = delete;
  FrozenWeights& operator=(const FrozenWeights&) = delete;

  static void enter();
  // Throws c10::Error where this thread has entered none.
  static void leave();
};

// The results of calls that take weights, constants and states.
class WeightCache {
 public:
  // What tells calls apart, beside the tensors that they take.
  struct Call {
    struct Weight {
      int value;
      std::string what;  // "[BasicLinear] weight", for errors
    };
    std::string key;              // of the op and its constants
    std::vector<Weight> weights;  // of a list all its tensors
    std::vector<int> states;      // values
  };

  // Those of the calling thread; null where it has entered no region.
  static WeightCache* current();
  // Nothing is kept of what is traced, or is made anew at each call.
  static bool may_keep(const at::Tensor& weight);

  // At least `count` results; null where they are not there. Throws c10::Error for a weight that
  // was modified in place since they were made.
  const Tensors* find(const Call& call, const Tensors& weights, const Tensors& states,
                      size_t count) const;
  void add(const Call& call, const Tensors& weights, const Tensors& states, Tensors results);

 private:
  // A tensor as it was, without owning it.
  class Known {
   public:
    explicit Known(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;  // the same object with the same memory
    bool is_object(const at::Tensor& tensor) const;
    bool is_gone() const { return tensor_.expired(); }
    uint32_t version() const { return version_; }
    static std::vector<Known> all(const Tensors& tensors);

   private:
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
    const void* data_;
    uint32_t version_;
  };
  struct Row {
    std::string key;
    std::vector<Known> weights;
    std::vector<Known> states;
    Tensors results;

    bool is_of(const Tensors& tensors) const;
    bool has_objects(const Tensors& tensors) const;
    bool is_gone() const;
  };

  void forget_dead();

  std::unordered_map<const c10::TensorImpl*, std::vector<Row>> rows_;  // by the first weight
  size_t swept_at_ = 64;  // so many weights there may be before the dead ones are looked for
};

}  // namespace transformer_ops
