// The delayed scaling buffers of a pipeline's ops, if no host language owns them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "executor/host.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/op_node.h"
#include "fuser/plan.h"
#include "quantization/delayed_scales.h"

namespace transformer_ops {

// How scales follow from the largest magnitudes (amax) of calls:
//   scale = largest number of the format / amax / 2^margin
struct ScaleUpdate {
  int64_t margin = 0;        // -63 to 63
  bool most_recent = false;  // uses the last amax, else the largest of the history
  // With several processes: replaces each number of a row by the largest of all processes.
  std::function<void(at::Tensor&)> reduce = {};
};

// Several threads may call it, but only one at a time may call update() or set().
class PipelineScales {
 public:
  // "op.name" -> tensor, with the names of the buffers in Python.
  using Named = std::map<std::string, at::Tensor>;

  // Appends the states of a plan. Missing ones are created with scales of 1 on `device`. Throws
  // c10::Error if an op's states are for other formats or another history length.
  void add_states(const Plan& plan, c10::Device device, Tensors& tensors);
  // Throws c10::Error if the margin is out of range.
  void update(const ScaleUpdate& how);
  Named named() const;
  // Throws c10::Error, with nothing changed, if the tensors do not fit the ops.
  void set(const std::vector<OpNode>& ops, const Named& named);
  void clear();

 private:
  struct State {
    std::string recipe;  // the recipe that the buffers belong to
    delayed_scaling::Buffers buffers;
  };
  using All = std::map<int, State>;  // by op

  // The buffers of an op, and whether it has any.
  std::pair<State, bool> find(int op) const;
  State find_or_make(const Plan& plan, int op, c10::Device device);
  All copy() const;

  mutable ForkSafeMutex mutex_;
  All all_;
};

}  // namespace transformer_ops
