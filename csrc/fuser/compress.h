#pragma once

#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// Compresses the main tensors that forward saves to codes and scales, if plan.saved or the flags of
// the ops say so. The first backward step that reads such a tensor decodes it:
//   s2.input.codes, s2.input.scale = quantize(x2, "int8 1x128")
//   s2.input = dequantize.saved(g3, s2.input.codes, s2.input.scale, "int8 1x128", "bfloat16", none)
// Not compressed are: statistics, masks and parameters; what the caller holds anyway (its inputs
// and outputs), unless saved.inputs is set; slots that Python steps fill; and tensors of unknown
// dtype, after a Python op. `dtypes`: those of the main tensor at each boundary.
void compress_saved(Plan& plan, const std::vector<DType>& dtypes);

}  // namespace transformer_ops
