#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fuser/registry.h"

namespace transformer_ops {

// Consecutive basic ops that run as one step.
struct StepGroup {
  int first = 0;
  int count = 1;
  const Rule* rule = nullptr;      // a native fused op
  std::optional<int> python = {};  // a Python object of the planning call: basic or fused
  std::string name = {};
  bool joint = false;
  std::vector<int> places = {};  // with a rule: Match::places
};

// A rule, or a user's function, that did not take a place it nearly matched, and why.
struct NearMiss {
  std::string fusion;
  Pass pass;
  std::vector<int> ops;
  std::string reason;
};

// Calls a user's function on a list of groups and returns its verified answer.
using UserRewrite =
    std::function<std::vector<StepGroup>(const Fusion&, const std::vector<StepGroup>&)>;

struct Rewritten {
  std::vector<StepGroup> forward;
  std::vector<StepGroup> backward;
  std::vector<NearMiss> near_misses;
};

// joint -> {forward, backward}; within a pass users' fusions run first, then rules by benefit.
Rewritten rewrite(const Analysis& analysis, const UserRewrite& user);

}  // namespace transformer_ops
