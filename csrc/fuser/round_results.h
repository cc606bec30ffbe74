#pragma once

#include <string>
#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// Has ops round what they give, where a product takes it rounded and nobody reads it as it is:
//   x1, s0.rstd = rms_norm(x0, ...)
//   t1.rounded_input = quantize_dequantize(x1, "mx e4m3", "bfloat16")
// becomes
//   x1, s0.rstd, t0.unused = rms_norm.rounded(x0, ..., "mx e4m3", "")
// and a gradient that its reader takes by rows and by columns
//   g2, t1.rounded_grad_output_columns =
//       swiglu_backward.rounded(g3, s2.input, 0, "mx e4m3", "mx e4m3 32x1")
// Under delayed scaling the scale is known before the tensor:
//   t1.rounded_input, t1.rounded_input_scale, st1.fp8_amax =
//       quantize_values_scaled(x1, st1.fp8_scale, 0, "e4m3", "bfloat16")
// becomes
//   x1, s0.rstd, t1.rounded_input_scale, st1.fp8_amax =
//       rms_norm.rounded_by(x0, ..., st1.fp8_scale, 0, "e4m3", true)
// `dtypes`: of the main tensor at each boundary. Formats whose scale follows from the whole tensor,
// numbers rounded in another dtype, and products of groups are left as they are.
void round_results(Plan& plan, const std::vector<DType>& dtypes);

// Behind the name of an op that rounds its first result: by scales of blocks, by one that is known
// before (op/row_rounding.h has what each takes and gives).
inline constexpr const char* kRounded = ".rounded";
inline constexpr const char* kRoundedBy = ".rounded_by";

// What typed ops are that plans call.
struct TargetTraits {
  bool rounds = false;      // there are <target>.rounded and <target>.rounded_by
  bool reads_first = true;  // the values of its first argument, which else ties it to backward
};
void set_traits(const std::string& target, TargetTraits traits);

}  // namespace transformer_ops
