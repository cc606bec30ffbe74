// Weights that the caller promises not to change for a while: results that depend only on a weight
// are computed once.
#pragma once

#include <c10/core/TensorImpl.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "executor/host.h"

namespace transformer_ops {

// While an object exists, calls on its thread, forward and backward, round each weight once for
// each format. Objects may nest; the results are freed with the outermost one.
class FrozenWeights {
 public:
  FrozenWeights() { enter(); }
  ~FrozenWeights() { leave(); }
  FrozenWeights(const FrozenWeights&) = delete;
  FrozenWeights& operator=(const FrozenWeights&) = delete;

  static void enter();
  // Throws c10::Error if this thread has entered none.
  static void leave();
};

// The results of calls that read only weights, constants and states.
class WeightCache {
 public:
  // What identifies a call, besides the tensors that it reads.
  struct Call {
    struct Weight {
      int value;
      std::string what;  // "[BasicLinear] weight", for errors
    };
    std::string key;              // that of the op and its constants
    std::vector<Weight> weights;  // all tensors of a list
    std::vector<int> states;      // values
  };

  // The cache of this thread; null if it has entered no region.
  static WeightCache* current();
  // Results are not cached while tracing, or for tensors that are new at each call.
  static bool may_keep(const at::Tensor& weight);

  // Returns at least `count` results, or null if they are not cached. Throws c10::Error if a weight
  // was modified in place since they were computed.
  const Tensors* find(const Call& call, const Tensors& weights, const Tensors& states,
                      size_t count) const;
  void add(const Call& call, const Tensors& weights, const Tensors& states, Tensors results);

 private:
  // Identifies a tensor at a time, without owning it.
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
  size_t swept_at_ = 64;  // the number of weights at which unused rows are removed
};

}  // namespace transformer_ops
