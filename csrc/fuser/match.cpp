#include <algorithm>

#include "fuser/rule.h"

namespace transformer_ops {

bool Match::input_requires_grad() const {
  if (!facts.grad_enabled) return false;
  if (facts.input.requires_grad) return true;
  // A channel that comes in before comes from an op before: only the caller's tensors are left.
  size_t from_caller = 0;
  for (int i = 0; i < first; ++i) {
    for (const TensorFacts& parameter : facts.parameters[i]) {
      if (parameter.requires_grad) return true;
    }
    from_caller += std::ranges::count_if(ops[i].sources,
                                         [](const auto& source) { return !source.has_value(); });
  }
  const auto begin = facts.extra_inputs.begin();
  return std::any_of(begin, begin + static_cast<std::ptrdiff_t>(from_caller),
                     [](const TensorFacts& extra) { return extra.requires_grad; });
}

bool Match::extra_output_is_read(int k) const {
  if (op(k).visible[0]) return true;
  return std::ranges::any_of(ops, [&](const OpNode& other) {
    return std::ranges::find(other.sources, OpNode::Source{first + k, 0}) != other.sources.end();
  });
}

}  // namespace transformer_ops
