#include "fuser/planner.h"

namespace transformer_ops {

Planned make_plan(const std::vector<OpNode>& ops, const Facts& facts, const UserRewrite& user) {
  Rewritten groups = rewrite(ops, facts, user);
  Plan plan = lower(ops, facts, groups);
  verify(plan);
  return {std::move(plan), std::move(groups.near_misses)};
}

}  // namespace transformer_ops
