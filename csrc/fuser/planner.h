#pragma once

#include "fuser/plan.h"
#include "fuser/rewrite.h"

namespace transformer_ops {

struct Planned {
  Plan plan;
  std::vector<NearMiss> near_misses;
};

// The whole pipeline: analyze, rewrite, lower to steps, verify. Throws PlanError if the result is
// wrong.
Planned make_plan(const std::vector<OpNode>& ops, const PlanKey& key, const UserRewrite& user = {},
                  const UserPattern& pattern = {});

// Lowers groups of ops to steps with instructions and saved slots (lower.cpp).
Plan lower(const Analysis& analysis, const Rewritten& groups);

}  // namespace transformer_ops
