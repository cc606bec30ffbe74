#include "fuser/planner.h"

namespace transformer_ops {

Planned make_plan(const std::vector<OpNode>& ops, const PlanKey& key, const UserRewrite& user,
                  const UserPattern& pattern) {
  const Analysis analysis(ops, key);
  Rewritten groups = rewrite(analysis, user, pattern);
  Plan plan = lower(analysis, groups);
  verify(plan);
  return {std::move(plan), std::move(groups.near_misses)};
}

}  // namespace transformer_ops
