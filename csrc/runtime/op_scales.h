// What the ops of a pipeline keep for delayed scaling where no host language keeps it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "executor/host.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/op_node.h"
#include "fuser/plan.h"
#include "runtime/delayed_scales.h"

namespace transformer_ops {

// How scales follow from the magnitudes (amax) that calls have met:
//   scale = largest number of the format / amax / 2^margin
struct ScaleUpdate {
  int64_t margin = 0;        // -63 to 63
  bool most_recent = false;  // amax is the last one, else the largest of the history
  // With several processes: makes each number of a row the largest of all processes, in place.
  std::function<void(at::Tensor&)> reduce = {};
};

// May be called from several threads; update() and set() from one at a time.
class OpScales {
 public:
  // "op.name" -> tensor, by the names that Python's buffers have.
  using Named = std::map<std::string, at::Tensor>;

  // Appends the states of a plan, which are made where there are none: scales of 1 on `device`.
  // Throws c10::Error where those of an op are for other formats or another length of the history.
  void add_states(const Plan& plan, c10::Device device, Tensors& tensors);
  // Throws c10::Error for a margin out of range.
  void update(const ScaleUpdate& how);
  Named named() const;
  // Throws c10::Error for those that do not fit the ops, before anything changes.
  void set(const std::vector<OpNode>& ops, const Named& named);
  void clear();

 private:
  struct Kept {
    std::string recipe;  // that they are for
    delayed_scaling::Buffers buffers;
  };
  using All = std::map<int, Kept>;  // by op

  // Those of an op, and whether it has any.
  std::pair<Kept, bool> find(int op) const;
  Kept find_or_make(const Plan& plan, int op, c10::Device device);
  All copy() const;

  mutable ForkSafeMutex mutex_;
  All all_;
};

}  // namespace transformer_ops
