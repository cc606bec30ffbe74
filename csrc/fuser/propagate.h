// Dtypes of the tensors between the ops, before any fusion.
#pragma once

#include <optional>
#include <vector>

#include "fuser/facts.h"

namespace transformer_ops {

// Of the main tensor at each boundary; boundary i lies before op i.
std::vector<DType> propagate_dtypes(const std::vector<OpNode>& ops, const Facts& facts);

// The dtype that op i insists on for an input of dtype `input`, or none.
std::optional<DType> required_dtype(const std::vector<OpNode>& ops, const Facts& facts, int i,
                                    DType input);

// Of extra input k of op i; `boundaries` reach at least to op i.
DType extra_input_dtype(const std::vector<OpNode>& ops, const Facts& facts,
                        const std::vector<DType>& boundaries, int i, int k);

}  // namespace transformer_ops
