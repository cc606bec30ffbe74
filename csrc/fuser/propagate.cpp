#include "fuser/propagate.h"

#include "fuser/declaration.h"

namespace transformer_ops {

std::vector<DType> propagate_dtypes(const std::vector<OpNode>& ops, const Facts& facts) {
  std::vector<DType> dtypes = {facts.input.dtype};
  for (int i = 0; i < static_cast<int>(ops.size()); ++i) {
    DType next = required_dtype(ops, facts, i, dtypes[i]).value_or(dtypes[i]);
    if (!ops[i].native) {
      next = DType::Unknown;
    } else if (declaration(ops[i].kind).dtype == DTypeRule::Promote) {
      for (int k = 0; k < ops[i].extra_inputs; ++k) {
        next = promote(next, extra_input_dtype(ops, facts, dtypes, i, k));
      }
    }
    dtypes.push_back(next);
  }
  return dtypes;
}

std::optional<DType> required_dtype(const std::vector<OpNode>& ops, const Facts& facts, int i,
                                    DType input) {
  if (!ops[i].native) return std::nullopt;
  switch (declaration(ops[i].kind).dtype) {
    case DTypeRule::Parameter: {
      // As in torch, autocast leaves float64 alone.
      const DType parameter = facts.parameters[i][0].dtype;
      return parameter == DType::Float64 ? parameter : facts.autocast.value_or(parameter);
    }
    case DTypeRule::Autocast:
      return input == DType::Float64 ? std::nullopt : facts.autocast;
    default:
      return std::nullopt;
  }
}

DType extra_input_dtype(const std::vector<OpNode>& ops, const Facts& facts,
                        const std::vector<DType>& boundaries, int i, int k) {
  if (const auto& source = ops[i].sources[k]) return boundaries[source->op];
  int from_caller = 0;
  for (int op = 0; op <= i; ++op) {
    const int count = op < i ? ops[op].extra_inputs : k;
    for (int other = 0; other < count; ++other) from_caller += ops[op].sources[other] ? 0 : 1;
  }
  return facts.extra_inputs[from_caller].dtype;
}

}  // namespace transformer_ops
