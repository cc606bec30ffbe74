#pragma once

#include <algorithm>
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
  std::optional<int> python = {};  // a Python object of the planning call, for a basic or a fused
                                   // op
  std::string name = {};
  bool joint = false;
  std::vector<int> places = {};  // Match::places, if there is a rule

  // The op of that entry of the pattern, or -1 if it is absent or there is no such entry.
  int place(int entry) const {
    return entry >= 0 && entry < std::ssize(places) ? places[entry] : -1;
  }
  // Is an optional op of the rule absent?
  bool lacks_an_op() const { return std::ranges::find(places, -1) != places.end(); }
};

// A rule or a user's function that nearly matched, and the reason why it did not.
struct NearMiss {
  std::string fusion;
  Pass pass;
  std::vector<int> ops;
  std::string reason;
  int matched = 0;          // the number of ops that fitted
  bool structural = false;  // the ops did not match: no guard refused, and no other fusion took
                            // them first
};

// Calls a user's function on a list of groups and returns its verified answer.
using UserRewrite =
    std::function<std::vector<StepGroup>(const Fusion&, const std::vector<StepGroup>&)>;

// What a user's pattern needs to know about a list of groups. `first` and `count` give a run of
// ops.
struct UserMatcher {
  // For each entry of the pattern and each group: is it a basic op that the entry accepts? Empty if
  // the fusion was removed meanwhile.
  std::vector<std::vector<bool>> fits;
  // The reason why the ops may not be taken, or none.
  std::function<std::optional<std::string>(int first, int count)> why_not;
  std::function<StepGroup(int first, int count)> make;
};
using UserPattern = std::function<UserMatcher(const Fusion&, const std::vector<StepGroup>&)>;

struct Rewritten {
  std::vector<StepGroup> forward;
  std::vector<StepGroup> backward;
  std::vector<NearMiss> near_misses;
};

// The passes run in the order joint -> {forward, backward}. Within a pass users' fusions run first,
// then rules by benefit.
Rewritten rewrite(const Analysis& analysis, const UserRewrite& user,
                  const UserPattern& pattern = {});

}  // namespace transformer_ops
