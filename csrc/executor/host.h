#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "executor/handle.h"

namespace transformer_ops {

using Tensors = std::vector<at::Tensor>;

class DeferredCall;

// The buffers of the caller to which the gradient of a weight is added; a listed weight has one for
// each tensor.
struct Accumulation {
  Tensors buffers;
  bool overwrite = false;
};

// The part of one call that is not native: the steps that the host language runs, and what it saves
// for them between forward and backward. Undefined tensors stand for None.
class HostCall {
 public:
  HostCall() : id(handles::next_id()) {}
  virtual ~HostCall() = default;
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // Runs step `step` of forward. Arguments: the main input, then the extra inputs of each op.
  // Results: the main output, the extra outputs of each op, the slots of each native op. `dtypes`:
  // the one that each op computes in.
  virtual Tensors forward(int step, const std::vector<at::ScalarType>& dtypes,
                          const Tensors& arguments) = 0;

  // The tensors that the contexts of the ops save: a row for each op, and one of the host's own.
  virtual std::vector<Tensors> saved() = 0;

  struct BackwardArguments {
    Tensors grads;               // of the main output and of each op's extra outputs
    std::vector<Tensors> saved;  // a row for each op: its slots, or its row of saved()
    std::vector<std::optional<at::ScalarType>> dtypes;  // set if a native step ran the forward
    Tensors own;                                        // the last row of saved()
  };
  // Runs step `step` of backward. Results: gradients of the main input, of the parameters of each
  // op, of the extra inputs of each op.
  virtual Tensors backward(int step, const BackwardArguments& arguments) = 0;

  // For error texts: "[Op] method", the method of a forward step that returns its outputs, or the
  // one that saves its slots.
  virtual std::string forward_method(int step, bool saves) = 0;
  virtual std::string parameter_name(int op, int k) = 0;

  // The buffers of a weight that accumulates, if a product may add to them directly. Otherwise the
  // gradients are passed to accumulate(), which is called in either case. Throws if the weight has
  // no buffer.
  virtual std::optional<Accumulation> accumulation(int op) = 0;
  // What autograd gets for tensor k of a weight. Its gradient is already in the buffer, or is
  // `gradient`, which is to be added.
  virtual at::Tensor accumulate(int op, int k, const at::Tensor& gradient) = 0;

  // The bytes saved for backward, by slot. This is called for real calls, not for traces.
  struct SavedSlot {
    int op;
    std::string name;
    int64_t bytes;
    uint64_t storage;  // slots in the same memory have the same number
  };
  virtual void note_saved(std::vector<SavedSlot> slots) = 0;

  // Stores the call that computes the gradient of an op's weight, to be run after backward.
  virtual void delay(int op, std::shared_ptr<const DeferredCall> call) = 0;

  const uint64_t id;
};

extern template class Handle<HostCall>;
using SharedHostCall = Handle<HostCall>;

}  // namespace transformer_ops
