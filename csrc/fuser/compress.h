#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// Has the main tensors that forward saves kept as codes and scales, as plan.saved and the flags of
// the ops say. The first backward step that reads one decodes it:
//   s2.input.codes, s2.input.scale = quantize(x2, "int8 1x128")
//   s2.input = dequantize.saved(g3, s2.input.codes, s2.input.scale, "int8 1x128", "bfloat16")
// Left as they are: statistics, masks and parameters; what the caller holds anyway (its inputs, and
// the outputs it is given), unless saved.inputs; what Python steps fill in; and a tensor whose
// dtype the plan does not know, behind a Python op. `dtypes`: of the main tensor at each boundary.
void compress_saved(Plan& plan, const std::vector<DType>& dtypes);

}  // namespace transformer_ops
