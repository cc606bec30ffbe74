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
  int matched = 0;          // ops that fitted
  bool structural = false;  // the next op is another one, or none; nobody refused or was first
};

// Calls a user's function on a list of groups and returns its verified answer.
using UserRewrite =
    std::function<std::vector<StepGroup>(const Fusion&, const std::vector<StepGroup>&)>;

// What a user's pattern asks of one list of groups. A run of ops is its first op and how many.
struct UserMatcher {
  // Per entry of the pattern, per group: is that a basic op which the entry takes? Empty for a
  // fusion that was removed meanwhile.
  std::vector<std::vector<bool>> fits;
  // The reason why not, or none.
  std::function<std::optional<std::string>(int first, int count)> why_not;
  std::function<StepGroup(int first, int count)> make;
};
using UserPattern = std::function<UserMatcher(const Fusion&, const std::vector<StepGroup>&)>;

struct Rewritten {
  std::vector<StepGroup> forward;
  std::vector<StepGroup> backward;
  std::vector<NearMiss> near_misses;
};

// joint -> {forward, backward}; within a pass users' fusions run first, then rules by benefit.
Rewritten rewrite(const Analysis& analysis, const UserRewrite& user,
                  const UserPattern& pattern = {});

}  // namespace transformer_ops
