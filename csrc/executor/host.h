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

// Where the gradient of a weight goes that is added to a buffer of the caller's; of a listed
// weight, a buffer for each tensor.
struct Accumulation {
  Tensors buffers;
  bool overwrite = false;
};

// The part of one call that is not native: the steps that the host language runs, and what it keeps
// for them between forward and backward. Undefined tensors stand for None.
class HostCall {
 public:
  HostCall() : id(handles::next_id()) {}
  virtual ~HostCall() = default;
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // Step `step` of forward. Arguments: the main input, then the extra inputs of each op. Results:
  // the main output, the extra outputs of each op, the slots of each native op. `dtypes`: what each
  // op computes in.
  virtual Tensors forward(int step, const std::vector<at::ScalarType>& dtypes,
                          const Tensors& arguments) = 0;

  // What the contexts of the ops keep for themselves: a row for each op, and one of the host's own.
  virtual std::vector<Tensors> saved() = 0;

  struct BackwardArguments {
    Tensors grads;               // of the main output and of each op's extra outputs
    std::vector<Tensors> saved;  // a row for each op: its slots, or its row of saved()
    std::vector<std::optional<at::ScalarType>> dtypes;  // where a native step ran the forward
    Tensors own;                                        // the last row of saved()
  };
  // Step `step` of backward. Results: gradients of the main input, of the parameters of each op, of
  // the extra inputs of each op.
  virtual Tensors backward(int step, const BackwardArguments& arguments) = 0;

  // For errors.
  virtual std::string parameter_name(int op, int k) = 0;

  // Of a weight that accumulates, the buffers, if a product may add to them, and how; the gradients
  // are given to accumulate() otherwise, which is called in either case. Throws where the weight
  // has no buffer at all.
  virtual std::optional<Accumulation> accumulation(int op) = 0;
  // What autograd gets for tensor k of a weight whose gradient is in its buffer, or is `gradient`,
  // to be added.
  virtual at::Tensor accumulate(int op, int k, const at::Tensor& gradient) = 0;

  // Bytes kept for backward, by slot. Called where a call is real and not a trace.
  struct SavedSlot {
    int op;
    std::string name;
    int64_t bytes;
    uint64_t storage;  // slots in the same memory share one
  };
  virtual void note_saved(std::vector<SavedSlot> slots) = 0;

  // Keeps the call that gives the gradient of an op's weight, to be run after backward.
  virtual void delay(int op, std::shared_ptr<const DeferredCall> call) = 0;

  const uint64_t id;
};

extern template class Handle<HostCall>;
using SharedHostCall = Handle<HostCall>;

}  // namespace transformer_ops
