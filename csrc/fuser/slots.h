#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// The slots that a backward step reads, in the order of its instructions. A Python step may read
// every slot of the native ops that it covers; a joint one chooses what it saves.
std::vector<Value> slots_read(const Plan& plan, const Step& step);

}  // namespace transformer_ops
